/* Sampling: the next token of every row from its logits, each row with its own settings.
 *
 * Compiled together with native.c, which comes first. A row is handled by one thread in one order, so its token depends on its own logits,
 * settings and uniform number alone. Tokens are drawn by the cumulative sum of their weights in vocabulary order; nothing is sorted but the
 * few tokens at the edge of top_p.
 *
 * Letters: n rows, V vocabulary. Tokens come in blocks of BLOCK, whose maxima and sums tell which blocks must be read again.
 */

#include <stdlib.h>

#define BLOCK 64
#define LEAST -50.0f /* e^LEAST of the largest weight counts as zero: a uniform number of 53 bits cannot tell it from zero */
#define ROUNDING 1e-6 /* top_p is reached up to the rounding of fp32 weights */
#define BUCKETS 1024 /* of logits; a power of two */

typedef struct {
    float logit;
    int32_t token;
} Candidate;

/* One row: logits (V), the largest and the smallest of them, maxima of the blocks, weights (V) and their sums over blocks, buckets (V), and room
 * for candidates (V). */
typedef struct {
    int V, blocks;
    const float *logits;
    float top, low, scale; /* scale = 1 / temperature */
    float *tops, *weights, *sums;
    int32_t *buckets;
    Candidate *found;
} Row;

static inline int block_end(const Row *r, int b) { return (b + 1) * BLOCK < r->V ? (b + 1) * BLOCK : r->V; }

/* Fills `tops`, `top` and `low`; returns 0 where a logit is infinite or NaN. */
static int find_maxima(Row *r) {
    v8i bad = {0};
    v8 least = all(INFINITY);
    int strange = 0;
    r->top = -INFINITY, r->low = INFINITY;
    for (int b = 0, i = 0; b < r->blocks; b++) {
        int end = block_end(r, b);
        float most = -INFINITY;
        v8 best = all(-INFINITY);
        for (; i + 8 <= end; i += 8) {
            v8 x = load(r->logits + i);
            bad |= ~(x - x == all(0));
            best = pick(x > best, x, best), least = pick(x < least, x, least);
        }
        for (int j = 0; j < 8; j++) most = best[j] > most ? best[j] : most;
        for (; i < end; i++) {
            strange |= !(r->logits[i] - r->logits[i] == 0);
            most = r->logits[i] > most ? r->logits[i] : most;
            r->low = r->logits[i] < r->low ? r->logits[i] : r->low;
        }
        r->tops[b] = most;
        r->top = most > r->top ? most : r->top;
    }
    for (int j = 0; j < 8; j++) strange |= bad[j] != 0, r->low = least[j] < r->low ? least[j] : r->low;
    return !strange;
}

/* The smallest token with the largest logit. */
static int argmax(const Row *r) {
    int b = 0, i;
    while (r->tops[b] != r->top) b++;
    for (i = b * BLOCK; r->logits[i] != r->top; i++) {}
    return i;
}

/* e^((x - top) * scale), at most 1; 0 below e^LEAST. As vexp, with fused multiply-adds and without its limits. */
static inline v8 weigh(v8 x, float top, float scale) {
    v8 depth = (x - all(top)) * all(scale), shifted = fma8(depth, all(1.44269504f), all(12582912.0f));
    v8 k = shifted - all(12582912.0f), rest = fma8(k, all(2.12194440e-4f), fma8(k, all(-0.693359375f), depth));
    v8 p = fma8(all(1.9875691500e-4f), rest, all(1.3981999507e-3f));
    p = fma8(p, rest, all(8.3334519073e-3f));
    p = fma8(p, rest, all(4.1665795894e-2f));
    p = fma8(p, rest, all(1.6666665459e-1f));
    p = fma8(p, rest, all(5.0000001201e-1f));
    p = fma8(p, rest * rest, rest + all(1.0f));
    v8i power = ((v8i)shifted - (v8i)all(12582912.0f) + 127) << 23;
    return pick(depth < all(LEAST), all(0), p * (v8)power);
}

/* weights = e^((logit - top) / temperature), 0 below the logit `least`, and their sums over blocks; returns the sum of all. *kept becomes the
 * number of logits that are not below `least`. */
static double find_weights(Row *r, float least, int *kept) {
    double mass = 0;
    v8i inside = {0};
    int count = 0;
    for (int b = 0, i = 0; b < r->blocks; b++) {
        int end = block_end(r, b);
        v8 sum = all(0);
        for (; i + 8 <= end; i += 8) {
            v8 x = load(r->logits + i), w = pick(x < all(least), all(0), weigh(x, r->top, r->scale));
            store(r->weights + i, w);
            sum += w;
            inside -= x >= all(least);
        }
        float s = total(sum);
        for (; i < end; i++) {
            int in = r->logits[i] >= least;
            s += r->weights[i] = in ? weigh(all(r->logits[i]), r->top, r->scale)[0] : 0;
            count += in;
        }
        mass += r->sums[b] = s;
    }
    for (int j = 0; j < 8; j++) count += inside[j];
    *kept = count;
    return mass;
}

/* Tokens with a logit below `least` lose their weight; the sums over blocks again, and that of all. */
static double drop_below(Row *r, float least) {
    double mass = 0;
    for (int b = 0; b < r->blocks; b++) {
        int i = b * BLOCK, end = block_end(r, b);
        v8 sum = all(0);
        for (; i + 8 <= end; i += 8) {
            v8 w = pick(load(r->logits + i) < all(least), all(0), load(r->weights + i));
            store(r->weights + i, w);
            sum += w;
        }
        float s = total(sum);
        for (; i < end; i++) s += r->weights[i] = r->logits[i] < least ? 0 : r->weights[i];
        mass += r->sums[b] = s;
    }
    return mass;
}

/* The value of rank k (0 is the largest) among n; puts the values into another order. */
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

/* The k-th largest logit where k is below the number of blocks: k blocks have a maximum of at least some value, so k tokens have such a logit,
 * and only those blocks are read. */
static float kth_of_few(Row *r, int k) {
    float *values = (float *)r->found;
    int count = 0;
    memcpy(values, r->tops, r->blocks * sizeof(float));
    float least = select_rank(r->blocks, values, k - 1);
    for (int b = 0; b < r->blocks; b++)
        if (r->tops[b] >= least)
            for (int i = b * BLOCK; i < block_end(r, b); i++) {
                values[count] = r->logits[i];
                count += r->logits[i] >= least;
            }
    return select_rank(count, values, k - 1);
}

/* Puts logits into buckets of equal width from the largest (bucket 0) down to `least`; bucket BUCKETS holds it and all below. Blocks without
 * a logit of at least `least` are left out. */
static void find_buckets(Row *r, float least) {
    float scale = BUCKETS / fmaxf(r->top - least, 1e-30f);
    for (int b = 0; b < r->blocks; b++) {
        if (r->tops[b] < least) continue;
        int i = b * BLOCK, end = block_end(r, b);
        for (; i + 8 <= end; i += 8) {
            v8 place = (all(r->top) - load(r->logits + i)) * all(scale);
            v8i bucket = __builtin_convertvector(pick(place < all(BUCKETS), place, all(BUCKETS)), v8i);
            memcpy(r->buckets + i, &bucket, sizeof bucket);
        }
        for (; i < end; i++) {
            float place = (r->top - r->logits[i]) * scale;
            r->buckets[i] = place < BUCKETS ? (int)place : BUCKETS;
        }
    }
}

/* The tokens of one bucket, in vocabulary order; returns how many. */
static int open_bucket(Row *r, float least, int bucket) {
    v8i wanted = {bucket, bucket, bucket, bucket, bucket, bucket, bucket, bucket};
    int count = 0;
    for (int b = 0; b < r->blocks; b++) {
        if (r->tops[b] < least) continue;
        int i = b * BLOCK, end = block_end(r, b);
        for (; i < end; i += 8) {
            if (i + 8 <= end) {
                v8i at;
                int64_t hit[4];
                memcpy(&at, r->buckets + i, sizeof at);
                at = at == wanted;
                memcpy(hit, &at, sizeof hit);
                if (!(hit[0] | hit[1] | hit[2] | hit[3])) continue;
            }
            for (int j = i; j < i + 8 && j < end; j++)
                if (r->buckets[j] == bucket) r->found[count++] = (Candidate){r->logits[j], j};
        }
    }
    return count;
}

/* The same for any k: logits are counted in buckets, and only the bucket of the k-th is looked at closely. */
static float kth_of_many(Row *r, int k) {
    int counts[BUCKETS + 1] = {0}, bucket = 0;
    float *values = (float *)r->found;
    find_buckets(r, r->low);
    for (int i = 0; i < r->V; i++) counts[r->buckets[i]]++;
    for (; counts[bucket] < k; bucket++) k -= counts[bucket];
    int inside = open_bucket(r, r->low, bucket);
    for (int i = 0; i < inside; i++) values[i] = r->found[i].logit;
    return select_rank(inside, values, k - 1);
}

/* Weights of the k most likely tokens, among equals of the last rank of the smaller ones; returns their sum. */
static double keep_top_k(Row *r, int k) {
    int kept;
    r->low = k < r->blocks ? kth_of_few(r, k) : kth_of_many(r, k);
    double mass = find_weights(r, r->low, &kept);
    if (kept == k) return mass;
    for (int i = r->V - 1; kept > k; i--)
        if (r->logits[i] == r->low) r->weights[i] = 0, kept--;
    return drop_below(r, r->low);
}

/* Larger logits first; among equals the smaller token. */
static int compare(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return (x->token > y->token) - (x->token < y->token);
}

/* The most likely tokens that together reach p of the weight keep theirs: every one whose predecessors have not reached it. Weights are added
 * up in buckets; only the bucket in which p is reached is sorted. Returns the sum of what is kept. */
static double keep_top_p(Row *r, double p, double mass) {
    double masses[BUCKETS + 8] = {0}, goal = p * mass * (1 - ROUNDING), before = 0;
    /* tokens below this have less than (1 - p) of the weight even if there were V of them */
    float least = r->top - fminf(logf(r->V / fmaxf(1 - p, 1e-7f)), -LEAST) / r->scale;
    int cut = 0, kept = 0;
    least = least > r->low ? least : r->low;
    find_buckets(r, least);
    for (int b = 0; b < r->blocks; b++)
        if (r->tops[b] >= least)
            for (int i = b * BLOCK; i < block_end(r, b); i++) { /* eight sums for the many of the last bucket: one would wait for itself */
                int bucket = r->buckets[i];
                masses[bucket + (i & 7 & -(bucket >> 10))] += r->weights[i];
            }
    while (cut < BUCKETS && before + masses[cut] < goal) before += masses[cut++];
    int edges = open_bucket(r, least, cut);
    qsort(r->found, edges, sizeof *r->found, compare);
    for (; kept < edges && (before < goal || kept == 0); kept++) before += r->weights[r->found[kept].token];
    if (!kept) return mass; /* rounding alone: p is reached by all that is left */
    for (int i = kept; i < edges; i++) r->weights[r->found[i].token] = 0;
    return drop_below(r, r->found[kept - 1].logit);
}

/* The token at which the cumulative sum of the weights passes u of the whole. */
static int draw(const Row *r, double mass, double u) {
    double goal = u * mass, before = 0;
    int b = 0, last = 0;
    for (; b < r->blocks - 1 && before + r->sums[b] <= goal; b++) before += r->sums[b];
    for (; r->sums[b] == 0 && b > 0; b--) {} /* only rounding leads past the last block that has weight */
    for (int i = b * BLOCK; i < block_end(r, b); i++) {
        if (r->weights[i] == 0) continue;
        last = i;
        before += r->weights[i];
        if (before > goal) break;
    }
    return last;
}

static int sample_row(Row *r, float temperature, int top_k, double top_p, double u, int32_t *finite) {
    if (!(*finite = find_maxima(r))) return 0;
    if (temperature == 0 || top_k == 1) return argmax(r);
    r->scale = 1.0f / temperature;
    int kept;
    double mass = top_k && top_k < r->V ? keep_top_k(r, top_k) : find_weights(r, r->low, &kept);
    if (top_p < 1) mass = keep_top_p(r, top_p, mass);
    return draw(r, mass, u);
}

typedef struct {
    int n, V;
    const float *logits, *temperature;
    const int32_t *top_k;
    const double *top_p, *u;
    float *work;
    int64_t *tokens;
    int32_t *finite;
} Samples;

static void sample_task(const void *arguments, Member *me) {
    const Samples *a = arguments;
    int V = a->V, blocks = (V + BLOCK - 1) / BLOCK;
    float *mine = a->work + me->part * (4L * V + 2L * blocks), *rest = mine + 4L * V;
    Row row = {.V = V, .blocks = blocks, .tops = rest, .weights = mine + 2L * V, .sums = rest + blocks, .buckets = (int32_t *)(mine + 3L * V),
               .found = (Candidate *)mine};
    Span s = phase(me, a->n, 1);
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) {
            row.logits = a->logits + (long)t * V;
            a->tokens[t] = sample_row(&row, a->temperature[t], a->top_k[t], a->top_p[t], a->u[t], &a->finite[t]);
        }
    settled(me, &s);
}

/* Tokens (n) from logits (n, V). temperature 0: the largest logit, the smallest token among equals. top_k 0 and top_p 1: no limit. u holds
 * a uniform number in (0, 1) for each row. finite (n) becomes 0 for a row with a logit that is infinite or NaN, whose token is 0. `work` holds
 * 4 V + 2 ceil(V / 64) floats for each thread. */
void sample(int threads, int n, int V, const float *logits, const float *temperature, const int32_t *top_k, const double *top_p, const double *u,
            float *work, int64_t *tokens, int32_t *finite) {
    Samples a = {n, V, logits, temperature, top_k, top_p, u, work, tokens, finite};
    RUN(threads, sample_task, a);
}
