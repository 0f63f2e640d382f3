/* Sampling: the next token of every row from its logits, each row with its own settings.
 *
 * Compiled after vector.c. A row is handled by one thread in one order, so its token depends on its own logits,
 * settings and uniform number alone. Tokens are drawn by the cumulative sum of their weights in vocabulary order; nothing is sorted but the
 * few tokens at the cutoff of top_p.
 *
 * Shapes: n rows, V vocabulary. The vocabulary is cut into tiles of TILE tokens; the maximum and the sum of a tile tell whether it must be read again.
 */

#include <stdlib.h>

#define TILE 64 /* tokens */
#define MIN_LOG_WEIGHT -50.0f /* weights below e^-50 of the largest count as zero: 53 random bits cannot resolve them */
#define ROUNDING 1e-6 /* relative tolerance of top_p, for the rounding of fp32 weights */
#define SAMPLED 16 /* every SAMPLED-th logit is read to estimate a rank */
#define FEW 64 /* values that are searched directly */
#define MAX_HALVINGS 16
#define BUCKETS 1024 /* of logits, and one more for the smallest */

typedef struct {
    float logit;
    int32_t token;
} Candidate;

/* One row: logits (V), the largest one and the smallest one that is kept, maxima of the tiles, weights (V), sums of the weights of each tile,
 * and memory for candidates (V) or for V logits and weights, with room for 16 more floats. */
typedef struct {
    int V, tiles;
    const float *logits;
    float max_logit, min_kept, scale; /* scale = 1 / temperature */
    float *tile_max, *weights, *sums;
    Candidate *candidates;
} Row;

static inline int tile_end(const Row *r, int b) { return (b + 1) * TILE < r->V ? (b + 1) * TILE : r->V; }

/* Computes tile_max, max_logit and min_kept (the smallest logit); returns 0 if a logit is infinite or NaN. */
static int find_tile_max(Row *r) {
    const float *logits = r->logits;
    float *restrict tile_max = r->tile_max, largest = -INFINITY, smallest = INFINITY;
    int whole = r->V / TILE, finite = 1;
    v8i not_zero = {0};
    v8 lowest = splat(INFINITY);
    for (int b = 0; b < whole; b++) {
        v8 best = splat(-INFINITY);
        for (int i = 0; i < TILE; i += 8) {
            v8 x = load(logits + b * TILE + i);
            not_zero |= (v8i)(x - x); /* 0 if x is finite, else NaN */
            best = max8(x, best), lowest = min8(x, lowest);
        }
        tile_max[b] = horizontal_max(best);
    }
    if (whole < r->tiles) tile_max[whole] = -INFINITY;
    for (int i = whole * TILE; i < r->V; i++) {
        finite &= logits[i] - logits[i] == 0;
        tile_max[whole] = logits[i] > tile_max[whole] ? logits[i] : tile_max[whole];
        smallest = logits[i] < smallest ? logits[i] : smallest;
    }
    for (int b = 0; b < r->tiles; b++) largest = tile_max[b] > largest ? tile_max[b] : largest;
    for (int j = 0; j < 8; j++) finite &= not_zero[j] == 0, smallest = lowest[j] < smallest ? lowest[j] : smallest;
    r->max_logit = largest, r->min_kept = smallest;
    return finite;
}

/* The smallest token with the largest logit. */
static int argmax(const Row *r) {
    int b = 0, i;
    while (r->tile_max[b] != r->max_logit) b++;
    for (i = b * TILE; r->logits[i] != r->max_logit; i++) {}
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
    return keep_where(at_least(z, splat(MIN_LOG_WEIGHT)), p * (v8)power);
}

/* weights = e^((logit - max_logit) / temperature), 0 for logits below `threshold`, and their sums over tiles; returns the total. *kept becomes
 * the number of logits that are not below `threshold`. */
static double compute_weights(Row *r, float threshold, int *kept) {
    const float *logits = r->logits, max_logit = r->max_logit, scale = r->scale;
    float *restrict weights = r->weights, *restrict sums = r->sums;
    int whole = r->V / TILE, count = 0;
    double total = 0;
    v8i inside = {0};
    for (int b = 0; b < whole; b++) {
        v8 sum = splat(0);
        if (r->tile_max[b] < threshold) {
            memset(weights + b * TILE, 0, TILE * sizeof *weights), sums[b] = 0;
            continue;
        }
        for (int i = b * TILE; i < (b + 1) * TILE; i += 8) {
            v8 x = load(logits + i);
            v8i in = at_least(x, splat(threshold));
            v8 w = keep_where(in, exp_weight(x, max_logit, scale));
            store(weights + i, w);
            sum += w;
            inside -= in;
        }
        sums[b] = horizontal_sum(sum);
    }
    if (whole < r->tiles) sums[whole] = 0;
    for (int i = whole * TILE; i < r->V; i++) {
        int in = logits[i] >= threshold;
        sums[whole] += weights[i] = in ? exp_weight(splat(logits[i]), max_logit, scale)[0] : 0;
        count += in;
    }
    for (int b = 0; b < r->tiles; b++) total += sums[b];
    for (int j = 0; j < 8; j++) count += inside[j];
    *kept = count;
    return total;
}

/* Sets the weights of logits below `threshold` to zero, updates the sums over tiles and returns the total. */
static double drop_below(Row *r, float threshold) {
    double total = 0;
    for (int b = 0; b < r->tiles; b++) {
        int i = b * TILE, end = tile_end(r, b);
        v8 sum = splat(0);
        if (r->sums[b] == 0) continue;
        if (r->tile_max[b] < threshold) {
            memset(r->weights + i, 0, (end - i) * sizeof *r->weights), r->sums[b] = 0;
            continue;
        }
        for (; i + 8 <= end; i += 8) {
            v8 w = keep_where(at_least(load(r->logits + i), splat(threshold)), load(r->weights + i));
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

/* The k-th largest logit, for k of at most the number of tiles; fast if k is far below it. The k-th largest tile maximum is a lower bound of
 * it, so only tiles that reach this bound are read. */
static float kth_largest_small_k(Row *r, int k) {
    float *values = (float *)r->candidates;
    int count = 0;
    memcpy(values, r->tile_max, r->tiles * sizeof(float));
    float threshold = select_rank(r->tiles, values, k - 1);
    for (int b = 0; b < r->tiles; b++)
        if (r->tile_max[b] >= threshold)
            for (int i = b * TILE; i < tile_end(r, b); i++) {
                values[count] = r->logits[i];
                count += r->logits[i] >= threshold;
            }
    return select_rank(count, values, k - 1);
}

/* Two estimates between which the logit lies at which the cumulative weight of the tokens, most likely first, reaches `share` of the total: with
 * weights NULL every token weighs 1. They are taken from every SAMPLED-th token and nearly always right. */
static void estimate_cutoff(const Row *r, const float *weights, double share, float *high, float *low) {
    float sums[BUCKETS + 1] = {0}, top = r->max_logit, width = fmaxf(top - r->min_kept, 1e-30f) / BUCKETS, scale = 1 / width;
    double total = 0, squares = 0, before = 0;
    int bucket = 0;
    for (int i = 0; i < r->V; i += SAMPLED) {
        float place = (top - r->logits[i]) * scale, w = weights ? weights[i] : 1;
        sums[place < BUCKETS ? (int)place : BUCKETS] += w;
        total += w, squares += w * w;
    }
    double margin = 3 * sqrt(squares * share * (1 - share)) + squares / total;
    for (; bucket < BUCKETS && before + sums[bucket] <= share * total - margin; bucket++) before += sums[bucket];
    *high = top - bucket * width;
    for (; bucket < BUCKETS && before < share * total + margin; bucket++) before += sums[bucket];
    *low = top - bucket * width;
}

/* Number of values of at least `threshold`. */
static int count_at_least(int n, const float *values, float threshold) {
    v8i sum = {0};
    int i = 0, count = 0;
    for (; i + 8 <= n; i += 8) sum -= at_least(load(values + i), splat(threshold));
    for (; i < n; i++) count += values[i] >= threshold;
    for (int j = 0; j < 8; j++) count += sum[j];
    return count;
}

/* Copies the values in [from, below) in their order; returns their number. `to` may be `values`. */
static int copy_between(int n, const float *values, float from, float below, float *to) {
    int i = 0, found = 0;
    for (; i + 8 <= n; i += 8) {
        v8 x = load(values + i);
        found += store_lanes(to + found, x, at_least(x, splat(from)) & ~at_least(x, splat(below)));
    }
    for (; i < n; i++)
        if (values[i] >= from && values[i] < below) to[found++] = values[i];
    return found;
}

/* The k-th largest logit for any k. Bounds of it are estimated; only logits between them are searched, and the bounds are halved while many
 * are left. A bound that turns out wrong is dropped. */
static float kth_largest(Row *r, int k) {
    float *values = (float *)r->candidates, high, low;
    estimate_cutoff(r, NULL, (double)k / r->V, &high, &low);
    int above = count_at_least(r->V, r->logits, high), down_to_low = count_at_least(r->V, r->logits, low);
    if (above >= k) low = high, high = INFINITY, above = 0;
    else if (down_to_low < k) high = low, low = -INFINITY, above = down_to_low;
    int n = copy_between(r->V, r->logits, low, high, values), rank = k - above;
    for (int i = 0; i < MAX_HALVINGS && n > FEW && low > -INFINITY && high < INFINITY; i++) {
        float middle = low + (high - low) / 2;
        above = count_at_least(n, values, middle);
        if (above >= rank) low = middle;
        else high = middle, rank -= above;
        n = copy_between(n, values, low, high, values);
    }
    return select_rank(n, values, rank - 1);
}

/* Keeps the weights of the k largest logits; of equal logits at rank k the smaller tokens are kept. Returns the sum of the kept weights. */
static double keep_top_k(Row *r, int k) {
    int kept;
    r->min_kept = k <= r->tiles / 4 ? kth_largest_small_k(r, k) : kth_largest(r, k);
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

/* Sum of the weights of logits of at least `threshold`. */
static double weight_at_least(int n, const float *logits, const float *weights, float threshold) {
    double total = 0;
    int i = 0;
    while (i + 8 <= n) {
        v8 sum = splat(0);
        for (int end = i + TILE; i + 8 <= n && i < end; i += 8)
            sum += keep_where(at_least(load(logits + i), splat(threshold)), load(weights + i));
        total += horizontal_sum(sum);
    }
    for (; i < n; i++) total += logits[i] >= threshold ? weights[i] : 0;
    return total;
}

/* Copies logits in [from, below) and their weights in their order; returns their number. The copies may replace the originals. */
static int copy_weights_between(int n, const float *logits, const float *weights, float from, float below, float *to_logits, float *to_weights) {
    int i = 0, found = 0;
    for (; i + 8 <= n; i += 8) {
        v8 x = load(logits + i), w = load(weights + i);
        v8i inside = at_least(x, splat(from)) & ~at_least(x, splat(below));
        store_lanes(to_weights + found, w, inside);
        found += store_lanes(to_logits + found, x, inside);
    }
    for (; i < n; i++)
        if (logits[i] >= from && logits[i] < below) to_logits[found] = logits[i], to_weights[found++] = weights[i];
    return found;
}

/* Collects the tokens with logits in [from, below), in vocabulary order; returns their number. */
static int collect_between(Row *r, float from, float below) {
    int i = 0, count = 0;
    for (; i + 8 <= r->V; i += 8) {
        v8 x = load(r->logits + i);
        for (unsigned lanes = lane_bits(at_least(x, splat(from)) & ~at_least(x, splat(below))); lanes; lanes &= lanes - 1) {
            int token = i + __builtin_ctz(lanes);
            r->candidates[count++] = (Candidate){r->logits[token], token};
        }
    }
    for (; i < r->V; i++)
        if (r->logits[i] >= from && r->logits[i] < below) r->candidates[count++] = (Candidate){r->logits[i], i};
    return count;
}

/* Keeps the most likely tokens up to the one at which their cumulative weight reaches p. Bounds of that token's logit are estimated and halved as
 * in kth_largest; only the tokens left between them are sorted. Returns the sum of the kept weights. */
static double keep_top_p(Row *r, double p, double total) {
    double goal = p * total * (1 - ROUNDING), before;
    float *logits = (float *)r->candidates, *weights = logits + r->V + 8, high, low;
    /* V tokens below this threshold would together have less than 1 - p of the weight */
    float threshold = r->max_logit - fminf(logf(r->V / fmaxf(1 - p, 1e-7f)), -MIN_LOG_WEIGHT) / r->scale;
    int kept = 0;
    threshold = threshold > r->min_kept ? threshold : r->min_kept;
    estimate_cutoff(r, r->weights, p, &high, &low);
    if (low < threshold || weight_at_least(r->V, r->logits, r->weights, low) < goal) low = threshold;
    before = high > low ? weight_at_least(r->V, r->logits, r->weights, high) : goal;
    if (before >= goal) high = INFINITY, before = 0;
    int n = copy_weights_between(r->V, r->logits, r->weights, low, high, logits, weights);
    for (int i = 0; i < MAX_HALVINGS && n > FEW; i++) {
        float top = high < r->max_logit ? high : r->max_logit, middle = low + (top - low) / 2;
        double above = weight_at_least(n, logits, weights, middle);
        if (before + above >= goal) low = middle;
        else high = middle, before += above;
        n = copy_weights_between(n, logits, weights, low, high, logits, weights);
    }
    int n_candidates = collect_between(r, low, high);
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
    for (; b < r->tiles - 1 && before + r->sums[b] <= goal; b++) before += r->sums[b];
    for (; r->sums[b] == 0 && b > 0; b--) {} /* rounding may lead past the last tile with weight */
    for (int i = b * TILE; i < tile_end(r, b); i++) {
        if (r->weights[i] == 0) continue;
        last = i;
        before += r->weights[i];
        if (before > goal) break;
    }
    return last;
}

static int sample_row(Row *r, float temperature, int top_k, double top_p, double u, int32_t *finite) {
    if (!(*finite = find_tile_max(r))) return 0;
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

static inline long sample_floats(int V) { return 3L * V + 2L * ((V + TILE - 1) / TILE) + 16; } /* scratch memory of a thread */

static void sample_task(const void *arguments, Thread *self) {
    const Samples *a = arguments;
    int V = a->V, tiles = (V + TILE - 1) / TILE;
    float *mine = a->scratch + self->index * sample_floats(V), *rest = mine + 2L * V + 16;
    Row row = {.V = V, .tiles = tiles, .candidates = (Candidate *)mine, .weights = rest, .tile_max = rest + V, .sums = rest + V + tiles};
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
 * sample_floats(V) floats for each thread (the same in library.py). */
void sample(int threads, int n, int V, const float *logits, const float *temperature, const int32_t *top_k, const double *top_p, const double *u,
            float *scratch, int64_t *tokens, int32_t *finite) {
    Samples a = {n, V, logits, temperature, top_k, top_p, u, scratch, tokens, finite};
    RUN_TASK(threads, sample_task, a);
}
