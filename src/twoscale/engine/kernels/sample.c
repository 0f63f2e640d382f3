/* Sampling: the next token of every row from its logits, each row with its own settings.
 *
 * Compiled after sample_limits.c. A row is handled by one thread in one order, so its token depends on its own logits, settings and uniform
 * number alone. Tokens are drawn by the cumulative sum of their weights in vocabulary order.
 *
 * Shapes: n rows, V vocabulary.
 */

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
    return r->tokens ? r->tokens[last] : last;
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
    const Row every_token = {.V = V, .tiles = tiles, .copies = mine, .weights = rest, .tile_max = rest + V, .sums = rest + V + tiles};
    Phase phase = begin_phase(self, a->n, 1);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            Row row = every_token;
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
