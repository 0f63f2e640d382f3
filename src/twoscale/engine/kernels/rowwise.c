/* Operations on each row by itself: embedding, RMSNorm, residual add, SiLU, and the norms that exit rules compare. */

static void rms_norm_row(int C, const float *x, const float *gain, float eps, float *y) {
    v8 sum = splat(0);
    int i = 0;
    for (; i + 8 <= C; i += 8) { v8 v = load(x + i); sum += v * v; }
    float s = horizontal_sum(sum);
    for (; i < C; i++) s += x[i] * x[i];
    float scale = 1.0f / sqrtf(s / C + eps);
    for (i = 0; i + 8 <= C; i += 8) store(y + i, load(x + i) * splat(scale) * load(gain + i));
    for (; i < C; i++) y[i] = x[i] * scale * gain[i];
}

/* out = norm(x + y) with `norm_after_add`, else x + norm(y); no norm if `gain` is null */
static void residual_norm_row(int C, int norm_after_add, const float *x, const float *y, const float *gain, float eps, float *out) {
    if (norm_after_add || !gain) {
        for (int i = 0; i < C; i++) out[i] = x[i] + y[i];
        if (gain) rms_norm_row(C, out, gain, eps, out);
    } else {
        rms_norm_row(C, y, gain, eps, out);
        for (int i = 0; i < C; i++) out[i] += x[i];
    }
}

/* Channels from .. to - 1 of silu(h[:M]), or of silu(h[:M]) * h[M:] if gated; y may be h. */
static void silu_row(int from, int to, int M, int gated, const float *h, float *y) {
    int i = from;
    for (; i + 8 <= to; i += 8) {
        v8 x = load(h + i), s = x / (splat(1.0f) + vexp(-x));
        store(y + i, gated ? s * load(h + M + i) : s);
    }
    for (; i < to; i++) {
        float s = h[i] / (1.0f + vexp(splat(-h[i]))[0]);
        y[i] = gated ? s * h[M + i] : s;
    }
}

#define MIN_PARALLEL_SIZE 16384 /* elements from which several threads are faster than one; the same number is in native.py */

/* Arguments of the row-wise kernels; each uses some of them. A branch is attention or the MLP of a block, whose output is added to the residual
 * stream. */
typedef struct {
    int n, C;
    int option;             /* silu: gated; residual_norm: norm_after_add */
    const float *in;        /* (n, C), silu: (n, C) or (n, 2 C); update_norms: before */
    const float *in2;       /* (n, C), update_norms only: after */
    const float *gain;      /* (C,), of the RMSNorm; null: no norm */
    const float *next_gain; /* (C,), residual_norm only: of the RMSNorm of the next branch's input; null: no such norm */
    float eps;              /* of the RMSNorms */
    float *out;             /* (n, C); update_norms: norms (n, 5) */
    float *in_out;          /* (n, C), residual_norm: the branch's output, then the next branch's input;
                             * update_norms: the previous update, then this one */
} RowWise;

static void silu_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    int in_width = r->option ? 2 * r->C : r->C;
    Phase phase = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) silu_row(0, r->C, r->C, r->option, r->in + (long)t * in_width, r->out + (long)t * r->C);
    finish_phase(self, &phase);
}

/* y = silu(x) for n rows of M, or silu(x[:M]) * x[M:] where x has 2 M columns; y may be x where it has M. */
void silu(int threads, int n, int M, int gated, const float *x, float *y) {
    RowWise r = {.n = n, .C = M, .option = gated, .in = x, .out = y};
    RUN_TASK(threads, silu_task, r);
}

static void rms_norm_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    Phase phase = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) rms_norm_row(r->C, r->in + (long)t * r->C, r->gain, r->eps, r->out + (long)t * r->C);
    finish_phase(self, &phase);
}

/* y = RMSNorm(x) for n rows */
void rms_norm(int threads, int n, int C, const float *x, const float *gain, float eps, float *y) {
    RowWise r = {.n = n, .C = C, .in = x, .gain = gain, .eps = eps, .out = y};
    RUN_TASK(threads, rms_norm_task, r);
}

static void residual_norm_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    Phase phase = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            long offset = (long)t * r->C;
            residual_norm_row(r->C, r->option, r->in + offset, r->in_out + offset, r->gain, r->eps, r->out + offset);
            if (r->next_gain) rms_norm_row(r->C, r->out + offset, r->next_gain, r->eps, r->in_out + offset);
        }
    finish_phase(self, &phase);
}

/* Residual add and norm: out = norm(x + y) or x + norm(y). If `next_gain` is given, also y = norm(out) with that gain, the
 * next branch's input. */
void residual_norm(int threads, int n, int C, int norm_after_add, const float *x, float *y, const float *gain,
                   const float *next_gain, float eps, float *out) {
    RowWise r = {.n = n, .C = C, .option = norm_after_add, .in = x, .gain = gain, .next_gain = next_gain, .eps = eps, .out = out, .in_out = y};
    RUN_TASK(threads, residual_norm_task, r);
}

#define NORMS 5
/* One row of `update_norms`. */
static void update_norms_row(int C, const float *before, const float *after, float *previous_update, float *norms) {
    v8 sums[NORMS] = {splat(0), splat(0), splat(0), splat(0), splat(0)};
    float rest[NORMS] = {0, 0, 0, 0, 0};
    int i = 0;
    for (; i + 8 <= C; i += 8) {
        v8 x = load(before + i), y = load(after + i), update = y - x, previous = load(previous_update + i);
        v8 change = update - previous;
        sums[0] = fma8(update, update, sums[0]), sums[1] = fma8(change, change, sums[1]), sums[2] = fma8(previous, previous, sums[2]);
        sums[3] = fma8(x, x, sums[3]), sums[4] = fma8(y, y, sums[4]);
        store(previous_update + i, update);
    }
    for (; i < C; i++) {
        float update = after[i] - before[i], change = update - previous_update[i];
        rest[0] += update * update, rest[1] += change * change, rest[2] += previous_update[i] * previous_update[i];
        rest[3] += before[i] * before[i], rest[4] += after[i] * after[i];
        previous_update[i] = update;
    }
    for (int j = 0; j < NORMS; j++) norms[j] = sqrtf(horizontal_sum(sums[j]) + rest[j]);
}

static void update_norms_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    Phase phase = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            long offset = (long)t * r->C;
            update_norms_row(r->C, r->in + offset, r->in2 + offset, r->in_out + offset, r->out + (long)NORMS * t);
        }
    finish_phase(self, &phase);
}

/* Norms for the exit rules, norms (n, 5): ||update||, ||update - previous_update||, ||previous_update||, ||before||, ||after|| with
 * update = after - before; then previous_update = update. NaN in `previous_update` gives NaN. */
void update_norms(int threads, int n, int C, const float *before, const float *after, float *previous_update, float *norms) {
    RowWise r = {.n = n, .C = C, .in = before, .in2 = after, .in_out = previous_update, .out = norms};
    RUN_TASK(threads, update_norms_task, r);
}

/* The embeddings of tokens, fp32 (n_tokens, C) or a matrix in panels, the other one null; and of positions, or null. */
typedef struct {
    int32_t C;
    float scale;
    int64_t n_tokens, n_positions;
    const float *wte;
    const Matrix *panels;
    const float *wpe;
} Embedding;

/* out = (wte[tokens] + wpe[positions]) * scale for n rows. Returns 0 if a token or a position has no embedding. */
int embed(int n, const Embedding *e, const int64_t *tokens, const int64_t *positions, float *out) {
    int C = e->C;
    for (int t = 0; t < n; t++, out += C) {
        if (tokens[t] < 0 || tokens[t] >= e->n_tokens || (e->wpe && (positions[t] < 0 || positions[t] >= e->n_positions))) return 0;
        const float *token = e->panels ? out : e->wte + tokens[t] * C, *position = e->wpe ? e->wpe + positions[t] * C : 0;
        if (e->panels) matrix_row(e->panels, tokens[t], out);
        for (int i = 0; i < C; i++) out[i] = (position ? token[i] + position[i] : token[i]) * e->scale;
    }
    return 1;
}
