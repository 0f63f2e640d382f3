/* The weights of the tokens of a row, and the limits top_k and top_p on them; for sample.c.
 *
 * Compiled after vector.c. Tokens stay in vocabulary order; nothing is sorted but the few logits at the cutoff of top_p.
 *
 * Shapes: V vocabulary. The vocabulary is cut into tiles of TILE tokens; the maximum and the sum of a tile tell whether it must be read again.
 */

#include <stdlib.h>

#define TILE 64 /* tokens */
#define MIN_LOG_WEIGHT -50.0f /* weights below e^-50 of the largest count as zero: 53 random bits cannot resolve them */
#define ROUNDING 1e-6 /* relative tolerance of top_p, for the rounding of fp32 weights */
#define SAMPLED 16 /* every SAMPLED-th logit is read to estimate a rank */
#define FEW 64 /* values that are searched directly */
#define MAX_HALVINGS 40
#define BUCKETS 1024 /* of logits, and one more for the smallest */

/* One row: logits (V), the largest one and the smallest one that is kept, maxima of the tiles, weights (V), sums of the weights of each tile,
 * and memory for copies of V logits and weights, with room for 16 more floats. Where top_k keeps few tokens, V is their number
 * (see `keep_only`). */
typedef struct {
    int V, tiles;
    const float *logits;
    const int32_t *tokens; /* (V): in vocabulary order; null: all of the vocabulary */
    float max_logit, min_kept, scale; /* scale = 1 / temperature */
    float *tile_max, *weights, *sums;
    float *copies;
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
    float *values = r->copies;
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
        found += store_lanes(to + found, (v8i)x, at_least(x, splat(from)) & ~at_least(x, splat(below)));
    }
    for (; i < n; i++)
        if (values[i] >= from && values[i] < below) to[found++] = values[i];
    return found;
}

/* The k-th largest logit for any k. Bounds of it are estimated; only logits between them are searched, and the bounds are halved while many
 * are left. A bound that turns out wrong is dropped. */
static float kth_largest(Row *r, int k) {
    float *values = r->copies, high, low;
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

/* Makes the row one of the n tokens with logits of at least `threshold` alone, so that what follows reads n logits instead of V. They are
 * stored in the memory of the weights, after the n weights: n is at most V / 4. */
static void keep_only(Row *r, int n, float threshold) {
    float *logits = r->weights + n;
    int32_t *tokens = (int32_t *)(logits + n + 8); /* store_lanes writes whole vectors */
    int found = 0;
    v8i eight = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int b = 0; b < r->tiles; b++) {
        int i = b * TILE, end = tile_end(r, b);
        if (r->tile_max[b] < threshold) continue;
        for (; i + 8 <= end; i += 8) {
            v8 x = load(r->logits + i);
            v8i inside = at_least(x, splat(threshold));
            store_lanes(tokens + found, eight + i, inside);
            found += store_lanes(logits + found, (v8i)x, inside);
        }
        for (; i < end; i++)
            if (r->logits[i] >= threshold) logits[found] = r->logits[i], tokens[found++] = i;
    }
    r->V = n, r->tiles = (n + TILE - 1) / TILE, r->logits = logits, r->tokens = tokens;
    find_tile_max(r);
}

/* Sets the weights of the last `n` tokens with this logit to zero. */
static void drop_last(Row *r, float logit, int n) {
    for (int i = r->V - 1; n > 0; i--)
        if (r->logits[i] == logit) r->weights[i] = 0, n--;
}

/* Keeps the weights of the k largest logits; of equal logits at rank k the smaller tokens are kept. Returns the sum of the kept weights. */
static double keep_top_k(Row *r, int k) {
    int kept;
    r->min_kept = k <= r->tiles / 4 ? kth_largest_small_k(r, k) : kth_largest(r, k);
    if (k <= r->V / 4 - 8 && (kept = count_at_least(r->V, r->logits, r->min_kept)) <= r->V / 4 - 8) keep_only(r, kept, r->min_kept);
    double total = compute_weights(r, r->min_kept, &kept);
    if (kept == k) return total;
    drop_last(r, r->min_kept, kept - k);
    return drop_below(r, r->min_kept);
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
        store_lanes(to_weights + found, (v8i)w, inside);
        found += store_lanes(to_logits + found, (v8i)x, inside);
    }
    for (; i < n; i++)
        if (logits[i] >= from && logits[i] < below) to_logits[found] = logits[i], to_weights[found++] = weights[i];
    return found;
}

/* weight_at_least of `high` and of `low`, and copy_weights_between them, in one pass over the row; returns the number of copies. */
static int split_weights(const Row *r, float low, float high, double *above, double *down_to_low, float *to_logits, float *to_weights) {
    int i = 0, found = 0;
    *above = *down_to_low = 0;
    while (i + 8 <= r->V) {
        v8 sum_above = splat(0), sum_inside = splat(0);
        for (int end = i + TILE; i + 8 <= r->V && i < end; i += 8) {
            v8 x = load(r->logits + i), w = load(r->weights + i);
            v8i over = at_least(x, splat(high)), inside = at_least(x, splat(low)) & ~over;
            sum_above += keep_where(over, w), sum_inside += keep_where(inside, w);
            store_lanes(to_weights + found, (v8i)w, inside);
            found += store_lanes(to_logits + found, (v8i)x, inside);
        }
        float tile_above = horizontal_sum(sum_above);
        *above += tile_above, *down_to_low += tile_above + (double)horizontal_sum(sum_inside);
    }
    for (; i < r->V; i++) {
        float x = r->logits[i], w = r->weights[i];
        if (x >= low) *down_to_low += w;
        if (x >= high) *above += w;
        else if (x >= low) to_logits[found] = x, to_weights[found++] = w;
    }
    return found;
}

/* Insertion sort, larger logits first: for few logits, or logits that are nearly all equal. */
static void sort_weights(int n, float *logits, float *weights) {
    for (int i = 1; i < n; i++) {
        float logit = logits[i], weight = weights[i];
        int j = i;
        for (; j > 0 && logits[j - 1] < logit; j--) logits[j] = logits[j - 1], weights[j] = weights[j - 1];
        logits[j] = logit, weights[j] = weight;
    }
}

/* Keeps the most likely tokens up to the one at which their cumulative weight reaches p. Bounds of that token's logit are estimated and halved as
 * in kth_largest; only the logits left between them are sorted. Of equal logits at the cutoff the smaller tokens are kept. Returns the sum of
 * the kept weights. */
static double keep_top_p(Row *r, double p, double total) {
    double goal = p * total * (1 - ROUNDING), before, down_to_low;
    float *logits = r->copies, *weights = logits + r->V + 8, high, low;
    /* V tokens below this threshold would together have less than 1 - p of the weight */
    float threshold = r->max_logit - fminf(logf(r->V / fmaxf(1 - p, 1e-7f)), -MIN_LOG_WEIGHT) / r->scale;
    int kept = 0;
    threshold = threshold > r->min_kept ? threshold : r->min_kept;
    estimate_cutoff(r, r->weights, p, &high, &low);
    low = low > threshold ? low : threshold, high = high > low ? high : low;
    int n = split_weights(r, low, high, &before, &down_to_low, logits, weights);
    if (before >= goal || (down_to_low < goal && low > threshold)) { /* an estimate was wrong */
        if (before >= goal) low = high, high = INFINITY, before = 0;
        else high = low, low = threshold, before = down_to_low;
        n = copy_weights_between(r->V, r->logits, r->weights, low, high, logits, weights);
    }
    for (int i = 0; i < MAX_HALVINGS && n > FEW; i++) {
        float top = high < r->max_logit ? high : r->max_logit, middle = low + (top - low) / 2;
        if (middle <= low && (middle = top) <= low) break; /* only equals are left */
        double above = weight_at_least(n, logits, weights, middle);
        if (before + above >= goal) low = middle;
        else high = middle, before += above;
        n = copy_weights_between(n, logits, weights, low, high, logits, weights);
    }
    sort_weights(n, logits, weights);
    for (; kept < n && (before < goal || kept == 0); kept++) before += weights[kept];
    if (!kept) return total; /* only by rounding: all tokens are needed to reach p */
    float cutoff = logits[kept - 1];
    int equals = 0; /* that are not kept */
    while (kept + equals < n && logits[kept + equals] == cutoff) equals++;
    drop_last(r, cutoff, equals);
    return drop_below(r, cutoff);
}
