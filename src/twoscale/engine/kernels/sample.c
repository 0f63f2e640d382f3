/* Sampling: the next token of every row from its logits, each row with its own settings.
 *
 * Compiled after vector.c. A row is handled by one thread in one order, so its token depends on its own logits,
 * settings and uniform number alone. Tokens are drawn by the cumulative sum of their weights in vocabulary order; nothing is sorted but the
 * few tokens at the cutoff of top_p.
 *
 * Shapes: n rows, V vocabulary. Tokens come in blocks of BLOCK, whose maxima and sums tell which blocks must be read again.
 */

#include <stdlib.h>

#define BLOCK 64
#define MIN_LOG_WEIGHT -50.0f /* weights below e^-50 of the largest count as zero: 53 random bits cannot resolve them */
#define ROUNDING 1e-6 /* top_p is reached up to the rounding of fp32 weights */
#define BUCKETS 1024 /* of logits, and one more, bucket BUCKETS, for those at or below the threshold */

typedef struct {
    float logit;
    int32_t token;
} Candidate;

/* One row: logits (V), the largest one and the smallest one that is kept, maxima of the blocks, weights (V), sums of the weights of each block,
 * bucket of each token (V), and memory for candidates (V). */
typedef struct {
    int V, blocks;
    const float *logits;
    float max_logit, min_kept, scale; /* scale = 1 / temperature */
    float *block_max, *weights, *sums;
    int32_t *buckets;
    Candidate *candidates;
} Row;

static inline int block_end(const Row *r, int b) { return (b + 1) * BLOCK < r->V ? (b + 1) * BLOCK : r->V; }

/* Computes block_max, max_logit and min_kept (the smallest logit); returns 0 if a logit is infinite or NaN. */
static int find_block_max(Row *r) {
    v8i bad = {0};
    v8 smallest = splat(INFINITY);
    int not_finite = 0;
    r->max_logit = -INFINITY, r->min_kept = INFINITY;
    for (int b = 0, i = 0; b < r->blocks; b++) {
        int end = block_end(r, b);
        float most = -INFINITY;
        v8 best = splat(-INFINITY);
        for (; i + 8 <= end; i += 8) {
            v8 x = load(r->logits + i);
            bad |= ~(x - x == splat(0));
            best = blend(x > best, x, best), smallest = blend(x < smallest, x, smallest);
        }
        for (int j = 0; j < 8; j++) most = best[j] > most ? best[j] : most;
        for (; i < end; i++) {
            not_finite |= !(r->logits[i] - r->logits[i] == 0);
            most = r->logits[i] > most ? r->logits[i] : most;
            r->min_kept = r->logits[i] < r->min_kept ? r->logits[i] : r->min_kept;
        }
        r->block_max[b] = most;
        r->max_logit = most > r->max_logit ? most : r->max_logit;
    }
    for (int j = 0; j < 8; j++) not_finite |= bad[j] != 0, r->min_kept = smallest[j] < r->min_kept ? smallest[j] : r->min_kept;
    return !not_finite;
}

/* The smallest token with the largest logit. */
static int argmax(const Row *r) {
    int b = 0, i;
    while (r->block_max[b] != r->max_logit) b++;
    for (i = b * BLOCK; r->logits[i] != r->max_logit; i++) {}
    return i;
}

/* e^((x - max_logit) * scale), at most 1; 0 below e^MIN_LOG_WEIGHT. Like vexp, with fused multiply-adds and without clamping. */
static inline v8 exp_weight(v8 x, float max_logit, float scale) {
    v8 z = (x - splat(max_logit)) * splat(scale), shifted = fma8(z, splat(1.44269504f), splat(12582912.0f));
    v8 k = shifted - splat(12582912.0f), rest = fma8(k, splat(2.12194440e-4f), fma8(k, splat(-0.693359375f), z));
    v8 p = fma8(splat(1.9875691500e-4f), rest, splat(1.3981999507e-3f));
    p = fma8(p, rest, splat(8.3334519073e-3f));
    p = fma8(p, rest, splat(4.1665795894e-2f));
    p = fma8(p, rest, splat(1.6666665459e-1f));
    p = fma8(p, rest, splat(5.0000001201e-1f));
    p = fma8(p, rest * rest, rest + splat(1.0f));
    v8i power = ((v8i)shifted - (v8i)splat(12582912.0f) + 127) << 23;
    return blend(z < splat(MIN_LOG_WEIGHT), splat(0), p * (v8)power);
}

/* weights = e^((logit - max_logit) / temperature), 0 for logits below `threshold`, and their sums over blocks; returns the total. *kept becomes
 * the number of logits that are not below `threshold`. */
static double compute_weights(Row *r, float threshold, int *kept) {
    double total = 0;
    v8i inside = {0};
    int count = 0;
    for (int b = 0, i = 0; b < r->blocks; b++) {
        int end = block_end(r, b);
        v8 sum = splat(0);
        for (; i + 8 <= end; i += 8) {
            v8 x = load(r->logits + i), w = blend(x < splat(threshold), splat(0), exp_weight(x, r->max_logit, r->scale));
            store(r->weights + i, w);
            sum += w;
            inside -= x >= splat(threshold);
        }
        float s = horizontal_sum(sum);
        for (; i < end; i++) {
            int in = r->logits[i] >= threshold;
            s += r->weights[i] = in ? exp_weight(splat(r->logits[i]), r->max_logit, r->scale)[0] : 0;
            count += in;
        }
        total += r->sums[b] = s;
    }
    for (int j = 0; j < 8; j++) count += inside[j];
    *kept = count;
    return total;
}

/* Sets the weights of logits below `threshold` to zero, updates the sums over blocks and returns the total. */
static double drop_below(Row *r, float threshold) {
    double total = 0;
    for (int b = 0; b < r->blocks; b++) {
        int i = b * BLOCK, end = block_end(r, b);
        v8 sum = splat(0);
        for (; i + 8 <= end; i += 8) {
            v8 w = blend(load(r->logits + i) < splat(threshold), splat(0), load(r->weights + i));
            store(r->weights + i, w);
            sum += w;
        }
        float s = horizontal_sum(sum);
        for (; i < end; i++) s += r->weights[i] = r->logits[i] < threshold ? 0 : r->weights[i];
        total += r->sums[b] = s;
    }
    return total;
}

/* Quickselect: the value of rank k (0 is the largest) among n; reorders the values. */
static float select_rank(int n, float *values, int k) {
    int low = 0, high = n - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float t = values[i];
                values[i++] = values[j], values[j--] = t;
            }
        }
        if (k <= j) high = j;
        else if (k >= i) low = i;
        else break;
    }
    return values[k];
}

/* The k-th largest logit, for k below the number of blocks. The k-th largest block maximum is a lower bound of it, so only blocks that reach
 * this bound are read. */
static float kth_largest_of_few(Row *r, int k) {
    float *values = (float *)r->candidates;
    int count = 0;
    memcpy(values, r->block_max, r->blocks * sizeof(float));
    float threshold = select_rank(r->blocks, values, k - 1);
    for (int b = 0; b < r->blocks; b++)
        if (r->block_max[b] >= threshold)
            for (int i = b * BLOCK; i < block_end(r, b); i++) {
                values[count] = r->logits[i];
                count += r->logits[i] >= threshold;
            }
    return select_rank(count, values, k - 1);
}

/* Assigns logits to buckets of equal width from the largest (bucket 0) down to `threshold`; the last bucket has `threshold` and all below. Blocks
 * without a logit of at least `threshold` are skipped. */
static void assign_buckets(Row *r, float threshold) {
    float scale = BUCKETS / fmaxf(r->max_logit - threshold, 1e-30f);
    for (int b = 0; b < r->blocks; b++) {
        if (r->block_max[b] < threshold) continue;
        int i = b * BLOCK, end = block_end(r, b);
        for (; i + 8 <= end; i += 8) {
            v8 place = (splat(r->max_logit) - load(r->logits + i)) * splat(scale);
            v8i bucket = __builtin_convertvector(blend(place < splat(BUCKETS), place, splat(BUCKETS)), v8i);
            memcpy(r->buckets + i, &bucket, sizeof bucket);
        }
        for (; i < end; i++) {
            float place = (r->max_logit - r->logits[i]) * scale;
            r->buckets[i] = place < BUCKETS ? (int)place : BUCKETS;
        }
    }
}

/* Collects the tokens of one bucket in `candidates`, in vocabulary order; returns their number. */
static int collect_bucket(Row *r, float threshold, int bucket) {
    v8i wanted = {bucket, bucket, bucket, bucket, bucket, bucket, bucket, bucket};
    int count = 0;
    for (int b = 0; b < r->blocks; b++) {
        if (r->block_max[b] < threshold) continue;
        int i = b * BLOCK, end = block_end(r, b);
        for (; i < end; i += 8) {
            if (i + 8 <= end) {
                v8i matches;
                int64_t hit[4];
                memcpy(&matches, r->buckets + i, sizeof matches);
                matches = matches == wanted;
                memcpy(hit, &matches, sizeof hit);
                if (!(hit[0] | hit[1] | hit[2] | hit[3])) continue;
            }
            for (int j = i; j < i + 8 && j < end; j++)
                if (r->buckets[j] == bucket) r->candidates[count++] = (Candidate){r->logits[j], j};
        }
    }
    return count;
}

/* The k-th largest logit for any k: logits are counted in buckets, and only the bucket of the k-th is searched. */
static float kth_largest(Row *r, int k) {
    int counts[BUCKETS + 1] = {0}, bucket = 0;
    float *values = (float *)r->candidates;
    assign_buckets(r, r->min_kept);
    for (int i = 0; i < r->V; i++) counts[r->buckets[i]]++;
    for (; counts[bucket] < k; bucket++) k -= counts[bucket];
    int inside = collect_bucket(r, r->min_kept, bucket);
    for (int i = 0; i < inside; i++) values[i] = r->candidates[i].logit;
    return select_rank(inside, values, k - 1);
}

/* Keeps the weights of the k largest logits; of equal logits at rank k the smaller tokens are kept. Returns the sum of the kept weights. */
static double keep_top_k(Row *r, int k) {
    int kept;
    r->min_kept = k < r->blocks ? kth_largest_of_few(r, k) : kth_largest(r, k);
    double total = compute_weights(r, r->min_kept, &kept);
    if (kept == k) return total;
    for (int i = r->V - 1; kept > k; i--)
        if (r->logits[i] == r->min_kept) r->weights[i] = 0, kept--;
    return drop_below(r, r->min_kept);
}

/* Larger logits first; among equals the smaller token. */
static int compare(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return (x->token > y->token) - (x->token < y->token);
}

/* Keeps the most likely tokens up to the one at which their cumulative weight reaches p. Weights are added up in buckets; only the bucket in
 * which p is reached is sorted. Returns the sum of the kept weights. */
static double keep_top_p(Row *r, double p, double total) {
    double masses[BUCKETS + 8] = {0}, goal = p * total * (1 - ROUNDING), before = 0;
    /* V tokens below this threshold would together have less than 1 - p of the weight */
    float threshold = r->max_logit - fminf(logf(r->V / fmaxf(1 - p, 1e-7f)), -MIN_LOG_WEIGHT) / r->scale;
    int cut = 0, kept = 0;
    threshold = threshold > r->min_kept ? threshold : r->min_kept;
    assign_buckets(r, threshold);
    for (int b = 0; b < r->blocks; b++)
        if (r->block_max[b] >= threshold)
            for (int i = b * BLOCK; i < block_end(r, b); i++) {
                /* Bucket BUCKETS has most tokens and eight accumulators: no chain of dependent additions. Its sum is not needed. */
                int bucket = r->buckets[i];
                masses[bucket + (bucket == BUCKETS) * (i & 7)] += r->weights[i];
            }
    while (cut < BUCKETS && before + masses[cut] < goal) before += masses[cut++];
    int n_candidates = collect_bucket(r, threshold, cut);
    qsort(r->candidates, n_candidates, sizeof *r->candidates, compare);
    for (; kept < n_candidates && (before < goal || kept == 0); kept++) before += r->weights[r->candidates[kept].token];
    if (!kept) return total; /* only by rounding: all tokens are needed to reach p */
    for (int i = kept; i < n_candidates; i++) r->weights[r->candidates[i].token] = 0;
    return drop_below(r, r->candidates[kept - 1].logit);
}

/* The token at which the cumulative sum of the weights exceeds u times the total. */
static int draw(const Row *r, double total, double u) {
    double goal = u * total, before = 0;
    int b = 0, last = 0;
    for (; b < r->blocks - 1 && before + r->sums[b] <= goal; b++) before += r->sums[b];
    for (; r->sums[b] == 0 && b > 0; b--) {} /* rounding may lead past the last block with weight */
    for (int i = b * BLOCK; i < block_end(r, b); i++) {
        if (r->weights[i] == 0) continue;
        last = i;
        before += r->weights[i];
        if (before > goal) break;
    }
    return last;
}

static int sample_row(Row *r, float temperature, int top_k, double top_p, double u, int32_t *finite) {
    if (!(*finite = find_block_max(r))) return 0;
    if (temperature == 0 || top_k == 1) return argmax(r);
    r->scale = 1.0f / temperature;
    int kept;
    double total = top_k && top_k < r->V ? keep_top_k(r, top_k) : compute_weights(r, r->min_kept, &kept);
    if (top_p < 1) total = keep_top_p(r, top_p, total);
    return draw(r, total, u);
}

typedef struct {
    int n, V;
    const float *logits, *temperature;
    const int32_t *top_k;
    const double *top_p, *u;
    float *scratch;
    int64_t *tokens;
    int32_t *finite;
} Samples;

static void sample_task(const void *arguments, Thread *self) {
    const Samples *a = arguments;
    int V = a->V, blocks = (V + BLOCK - 1) / BLOCK;
    float *mine = a->scratch + self->index * (4L * V + 2L * blocks), *rest = mine + 4L * V;
    Row row = {.V = V, .blocks = blocks, .block_max = rest, .weights = mine + 2L * V, .sums = rest + blocks, .buckets = (int32_t *)(mine + 3L * V),
               .candidates = (Candidate *)mine};
    Phase phase = begin_phase(self, a->n, 1);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            row.logits = a->logits + (long)t * V;
            a->tokens[t] = sample_row(&row, a->temperature[t], a->top_k[t], a->top_p[t], a->u[t], &a->finite[t]);
        }
    finish_phase(self, &phase);
}

/* Tokens (n) from logits (n, V). temperature 0: the largest logit, the smallest token among equals. top_k 0 and top_p 1: no limit. u holds
 * a uniform number in (0, 1) for each row. finite[t] is 0 if row t has a logit that is infinite or NaN; its token is then 0. `scratch` holds
 * 4 V + 2 ceil(V / 64) floats for each thread. */
void sample(int threads, int n, int V, const float *logits, const float *temperature, const int32_t *top_k, const double *top_p, const double *u,
            float *scratch, int64_t *tokens, int32_t *finite) {
    Samples a = {n, V, logits, temperature, top_k, top_p, u, scratch, tokens, finite};
    RUN_TASK(threads, sample_task, a);
}
