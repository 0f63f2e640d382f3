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
#define LEAST -80.0f /* e^LEAST of the largest weight counts as zero: a uniform number of 53 bits cannot tell it from zero */
#define ROUNDING 1e-6 /* top_p is reached up to the rounding of fp32 weights */
#define BUCKETS 1280 /* of 1/16 nat each, from the largest weight down to e^LEAST of it */

typedef struct {
    float logit;
    int32_t token;
} Candidate;

/* One row: logits (V), the largest of them, maxima of the blocks, weights (V) and their sums over blocks, and room for candidates (V). */
typedef struct {
    int V, blocks;
    const float *logits;
    float top, scale; /* scale = 1 / temperature */
    float *tops, *weights, *sums;
    Candidate *found;
} Row;

static inline int block_end(const Row *r, int b) { return (b + 1) * BLOCK < r->V ? (b + 1) * BLOCK : r->V; }

/* Fills `tops` and `top`; returns 0 where a logit is infinite or NaN. */
static int find_maxima(Row *r) {
    v8i bad = {0};
    int strange = 0;
    r->top = -INFINITY;
    for (int b = 0, i = 0; b < r->blocks; b++) {
        int end = block_end(r, b);
        float most = -INFINITY;
        v8 best = all(-INFINITY);
        for (; i + 8 <= end; i += 8) {
            v8 x = load(r->logits + i);
            bad |= ~(x - x == all(0));
            best = pick(x > best, x, best);
        }
        for (int j = 0; j < 8; j++) most = best[j] > most ? best[j] : most;
        for (; i < end; i++) {
            strange |= !(r->logits[i] - r->logits[i] == 0);
            most = r->logits[i] > most ? r->logits[i] : most;
        }
        r->tops[b] = most;
        r->top = most > r->top ? most : r->top;
    }
    for (int j = 0; j < 8; j++) strange |= bad[j] != 0;
    return !strange;
}

/* The smallest token with the largest logit. */
static int argmax(const Row *r) {
    int b = 0, i;
    while (r->tops[b] != r->top) b++;
    for (i = b * BLOCK; r->logits[i] != r->top; i++) {}
    return i;
}

static inline v8 weigh(v8 x, float top, float scale) {
    v8 depth = (x - all(top)) * all(scale);
    return pick(depth < all(LEAST), all(0), vexp(depth));
}

/* weights = e^((logit - top) / temperature) */
static void find_weights(Row *r) {
    int i = 0;
    for (; i + 8 <= r->V; i += 8) store(r->weights + i, weigh(load(r->logits + i), r->top, r->scale));
    for (; i < r->V; i++) r->weights[i] = weigh(all(r->logits[i]), r->top, r->scale)[0];
}

/* Fills `sums` and returns the sum of all weights. */
static double find_sums(Row *r) {
    double mass = 0;
    for (int b = 0, i = 0; b < r->blocks; b++) {
        int end = block_end(r, b);
        v8 sum = all(0);
        for (; i + 8 <= end; i += 8) sum += load(r->weights + i);
        float s = total(sum);
        for (; i < end; i++) s += r->weights[i];
        mass += r->sums[b] = s;
    }
    return mass;
}

/* Tokens with a logit below `least` lose their weight. */
static void drop_below(Row *r, float least) {
    for (int b = 0; b < r->blocks; b++) {
        int i = b * BLOCK, end = block_end(r, b);
        if (r->tops[b] < least) {
            memset(r->weights + i, 0, (end - i) * sizeof(float));
            continue;
        }
        for (; i + 8 <= end; i += 8) store(r->weights + i, pick(load(r->logits + i) < all(least), all(0), load(r->weights + i)));
        for (; i < end; i++) r->weights[i] = r->logits[i] < least ? 0 : r->weights[i];
    }
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

/* The k most likely tokens keep their weight; among equals of the last rank the smaller tokens do. */
static void keep_top_k(Row *r, int k) {
    float least = -INFINITY, *values = (float *)r->found;
    int count = 0;
    if (k < r->blocks) { /* k blocks have a maximum of at least this, so k tokens have such a logit */
        memcpy(values, r->tops, r->blocks * sizeof(float));
        least = select_rank(r->blocks, values, k - 1);
    }
    for (int b = 0; b < r->blocks; b++)
        if (r->tops[b] >= least)
            for (int i = b * BLOCK; i < block_end(r, b); i++) {
                values[count] = r->logits[i];
                count += r->logits[i] >= least;
            }
    least = select_rank(count, values, k - 1);
    drop_below(r, least);
    int equals = k;
    for (int i = 0; i < count; i++) equals -= values[i] > least;
    for (int b = 0; b < r->blocks; b++)
        if (r->tops[b] >= least)
            for (int i = b * BLOCK; i < block_end(r, b); i++)
                if (r->logits[i] == least && equals-- <= 0) r->weights[i] = 0;
}

/* Larger logits first; among equals the smaller token. */
static int compare(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return (x->token > y->token) - (x->token < y->token);
}

static inline int bucket_of(const Row *r, float logit) {
    float depth = (r->top - logit) * r->scale;
    return depth < -LEAST ? (int)(depth * (BUCKETS / -LEAST)) : BUCKETS;
}

/* The most likely tokens that together reach p of the weight keep theirs: every one whose predecessors have not reached it. Weights are added
 * up in buckets by logit; only the bucket in which p is reached is sorted. */
static void keep_top_p(Row *r, double p, double mass) {
    double masses[BUCKETS + 1] = {0}, goal = p * mass * (1 - ROUNDING), before = 0;
    /* tokens below `least` have less than (1 - p) of the weight even if there were V of them */
    float least = r->top - fminf(logf(r->V / fmaxf(1 - p, 1e-7f)), -LEAST) / r->scale;
    int cut = 0, edges = 0, kept = 0;
    for (int b = 0; b < r->blocks; b++)
        if (r->tops[b] >= least)
            for (int i = b * BLOCK; i < block_end(r, b); i++) masses[bucket_of(r, r->logits[i])] += r->weights[i];
    while (cut < BUCKETS - 1 && before + masses[cut] < goal) before += masses[cut++];
    for (int b = 0; b < r->blocks; b++)
        if (r->tops[b] >= least && bucket_of(r, r->tops[b]) <= cut)
            for (int i = b * BLOCK; i < block_end(r, b); i++) {
                r->found[edges] = (Candidate){r->logits[i], i};
                edges += bucket_of(r, r->logits[i]) == cut && r->weights[i] > 0;
            }
    if (!edges) return; /* rounding alone: p is reached by all that is left */
    qsort(r->found, edges, sizeof *r->found, compare);
    for (; kept < edges && (before < goal || kept == 0); kept++) before += r->weights[r->found[kept].token];
    drop_below(r, r->found[kept - 1].logit);
    for (; kept < edges; kept++) r->weights[r->found[kept].token] = 0;
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
    find_weights(r);
    if (top_k && top_k < r->V) keep_top_k(r, top_k);
    double mass = find_sums(r);
    if (top_p < 1) {
        keep_top_p(r, top_p, mass);
        mass = find_sums(r);
    }
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
    float *mine = a->work + me->part * (3L * V + 2L * blocks);
    Row row = {V, blocks, 0, 0, 1, mine + 3L * V, mine + 2L * V, mine + 3L * V + blocks, (Candidate *)mine};
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
 * 3 V + 2 ceil(V / 64) floats for each thread. */
void sample(int threads, int n, int V, const float *logits, const float *temperature, const int32_t *top_k, const double *top_p, const double *u,
            float *work, int64_t *tokens, int32_t *finite) {
    Samples a = {n, V, logits, temperature, top_k, top_p, u, work, tokens, finite};
    run(threads, sample_task, &a, sizeof a);
}
