/* A fused transformer block. */

/* A block's sizes and weights; library.py has the same fields in the same order. The gains are those of the RMSNorms: gain1 of attention's
 * input, gain2 of its output, gain3 of the MLP's input, gain4 of its output. With norm_after_add, gain2 and gain4 apply to the sum of residual
 * and output instead; they are null in a pre-norm block. */
typedef struct {
    int32_t C, H, J, D, M, gated, norm_after_add;
    float eps;
    const float *gain1, *qk_bias, *gain2, *gain3, *gain4;
    Matrix qkv, out, up, down;
} Block;

/* Adds the bias of queries and keys and applies the rotary embedding to heads first .. last - 1 of one row of heads (H + J, D); each is optional.
 * `sin` is signed: its first half holds -sin, its second half sin. */
static void add_bias_and_rope(const Block *b, int first, int last, const float *cos, const float *sin, float *row) {
    int D = b->D, half = D / 2;
    for (int h = first; h < last; h++) {
        float *head = row + (long)h * D;
        if (b->qk_bias)
            for (int i = 0; i < D; i++) head[i] += b->qk_bias[h * D + i];
        if (cos)
            for (int i = 0; i < half; i++) {
                float p = head[i], q = head[i + half];
                head[i] = p * cos[i] + q * sin[i];
                head[i + half] = q * cos[i + half] + p * sin[i + half];
            }
    }
}

/* Arguments of a fused block on n rows. Sizes are copied from the weights, because a task reads no other memory before its first claim. */
typedef struct {
    int n, C, M, gated;
    int by_head; /* qkv and attention in one phase of key/value heads */
    int qkv_width, attn_width, up_width; /* (H + 2 J) D, H D, and M or 2 M if gated */
    int has_bias_or_rope;
    const Block *b;
    int normed_is_ready;    /* the norm of attention's input is in `normed` already */
    const float *next_gain; /* of attention's input in the next block: its norm goes to `normed`; null: none */
    float next_eps;
    const float *x, *cos, *sin;
    Matrix qkv, attn_out, up, down;
    /* (n, C): normed, the input of a branch (attention or MLP) after its norm; branch, its output; residual, the residual stream between the two
     * branches. heads (n, qkv_width): queries, keys and values; hidden (n, up_width): the MLP's hidden layer. */
    float *normed, *branch, *residual, *heads, *hidden, *out;
    Attention attention;
} BlockRows;

/* With at most FEW_ROWS rows, attention and the MLP's first half take one phase each, in which a thread uses what it has computed itself:
 * less is moved between the caches of the cores. */
#define FEW_ROWS 64

/* Queries, keys and values of the normed rows, and attention, in one phase of key/value heads. */
static int qkv_and_attention_by_head(Thread *self, const BlockRows *a) {
    const Attention *at = &a->attention;
    int J = at->J, group = at->H / J, panels = at->D / PANEL, quantized_from = -1, share = J / self->n_threads;
    Phase phase = begin_phase(self, J, a->n <= 2 || share < 2 ? share : 1);
    while (claim(self, &phase)) {
        int first = phase.first, last = phase.last, starts[3] = {first * group, at->H + first, at->H + J + first}, counts[3] = {(last - first) * group, last - first, last - first};
        for (int i = 0; i < 3; i++) /* queries, keys, values */
            matmul_range(a->n, &a->qkv, starts[i] * panels, (starts[i] + counts[i]) * panels, a->normed, a->C, a->heads, a->qkv_width, &quantized_from);
        for (int t = 0; t < a->n; t++) {
            for (int i = 0; i < 2 && a->has_bias_or_rope; i++)
                add_bias_and_rope(a->b, starts[i], starts[i] + counts[i], a->cos ? a->cos + (long)t * at->D : 0, a->sin ? a->sin + (long)t * at->D : 0,
                                  a->heads + (long)t * a->qkv_width);
            write_keys_and_values(at, t, first, last);
        }
        for (int h = first * group; h < last * group; h++)
            for (int t = 0; t < a->n; t += ATTEND_ROWS) attend_rows(at, t, t + ATTEND_ROWS < a->n ? t + ATTEND_ROWS : a->n, h, scores_of_thread(at, self));
    }
    return finish_phase(self, &phase);
}

/* The same in four phases, for any shape. */
static int qkv_and_attention(Thread *self, const BlockRows *a) {
    const Block *b = a->b;
    if (!matmul(self, a->n, &a->qkv, a->normed, a->C, a->heads, a->qkv_width)) return 0;
    Phase phase = begin_phase(self, a->has_bias_or_rope ? a->n : 0, items_per_claim(self, a->n));
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++)
            add_bias_and_rope(b, 0, b->H + b->J, a->cos ? a->cos + (long)t * b->D : 0, a->sin ? a->sin + (long)t * b->D : 0, a->heads + (long)t * a->qkv_width);
    return finish_phase(self, &phase) && attention(self, &a->attention);
}

/* Channels from .. to - 1 of the activation, for all rows. */
static void silu_rows(const BlockRows *a, int from, int to) {
    for (int t = 0; t < a->n; t++) silu_row(from, to, a->M, a->gated, a->hidden + (long)t * a->up_width, a->hidden + (long)t * a->up_width);
}

/* The first map of the MLP and the activation in one phase of panels. */
static int up_and_silu_by_panel(Thread *self, const BlockRows *a) {
    int n_panels = a->M / PANEL, quantized_from = -1;
    Phase phase = begin_phase(self, n_panels, panels_per_claim(self, a->n, n_panels));
    while (claim(self, &phase)) {
        for (int i = 0; i <= a->gated; i++)
            matmul_range(a->n, &a->up, i * n_panels + phase.first, i * n_panels + phase.last, a->normed, a->C, a->hidden, a->up_width, &quantized_from);
        silu_rows(a, phase.first * PANEL, phase.last * PANEL);
    }
    return finish_phase(self, &phase);
}

/* The same in two phases, for any shape. */
static int up_and_silu(Thread *self, const BlockRows *a) {
    if (!matmul(self, a->n, &a->up, a->normed, a->C, a->hidden, a->up_width)) return 0;
    Phase phase = begin_phase(self, (a->M + 63) / 64, items_per_claim(self, (a->M + 63) / 64)); /* 64 channels of all rows */
    while (claim(self, &phase)) silu_rows(a, 64 * phase.first, 64 * phase.last < a->M ? 64 * phase.last : a->M);
    return finish_phase(self, &phase);
}

static void block_task(const void *arguments, Thread *self) {
    const BlockRows *a = arguments;
    const Block *b = a->b;
    int n = a->n, C = a->C, rows_per_claim = items_per_claim(self, n);
    Phase phase = begin_phase(self, a->normed_is_ready ? 0 : n, rows_per_claim);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) rms_norm_row(C, a->x + (long)t * C, b->gain1, b->eps, a->normed + (long)t * C);
    if (!finish_phase(self, &phase)) return;
    if (!(a->by_head ? qkv_and_attention_by_head : qkv_and_attention)(self, a)) return;
    if (!matmul(self, n, &a->attn_out, a->attention.out, a->attn_width, a->branch, C)) return;
    phase = begin_phase(self, n, rows_per_claim);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            long offset = (long)t * C;
            residual_norm_row(C, b->norm_after_add, a->x + offset, a->branch + offset, b->gain2, b->eps, a->residual + offset);
            rms_norm_row(C, a->residual + offset, b->gain3, b->eps, a->normed + offset);
        }
    if (!finish_phase(self, &phase)) return;
    if (!(n <= FEW_ROWS && a->M % PANEL == 0 ? up_and_silu_by_panel : up_and_silu)(self, a)) return;
    if (!matmul(self, n, &a->down, a->hidden, a->up_width, a->branch, C)) return;
    phase = begin_phase(self, n, rows_per_claim);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            long offset = (long)t * C;
            residual_norm_row(C, b->norm_after_add, a->residual + offset, a->branch + offset, b->gain4, b->eps, a->out + offset);
            if (a->next_gain) rms_norm_row(C, a->out + offset, a->next_gain, a->next_eps, a->normed + offset);
        }
    finish_phase(self, &phase);
}

/* One of the successive fused blocks of a stage, on n rows of several sequences. cos and sin are (n, D) or null; scratch holds n * (3 C + qkv_width + attn_width + up_width)
 * + ATTEND_ROWS threads score_stride(longest) floats. The norm at the start of the next block is taken
 * here, and kept in scratch: each block but the last is given the `next` one, and each but the first finds its normed input there
 * (`normed_is_ready`). */
static void block_in_stage(int threads, int n, const Block *b, const Block *next, int normed_is_ready, const float *x, const float *cos, const float *sin,
                           const KVView *view, float *scratch, float *out) {
    int C = b->C, H = b->H, J = b->J, D = b->D, M = b->M;
    int qkv_width = (H + 2 * J) * D, attn_width = H * D, up_width = b->gated ? 2 * M : M;
    float *normed = scratch, *branch = normed + (long)n * C, *residual = branch + (long)n * C, *heads = residual + (long)n * C;
    float *attended = heads + (long)n * qkv_width, *hidden = attended + (long)n * attn_width, *scores = hidden + (long)n * up_width;
    const float *keys = heads + (long)H * D, *values = keys + (long)J * D;
    Attention attention = {n, H, J, D, heads, keys, values, qkv_width, qkv_width, qkv_width, view->longest, view, scores, attended};
    int by_head = n <= FEW_ROWS && D % PANEL == 0 && (J % threads == 0 || J >= 4 * threads);
    BlockRows a = {.n = n, .C = C, .M = M, .gated = b->gated, .by_head = by_head, .qkv_width = qkv_width, .attn_width = attn_width, .up_width = up_width,
                   .has_bias_or_rope = b->qk_bias || cos, .normed_is_ready = normed_is_ready, .next_gain = next ? next->gain1 : 0, .next_eps = next ? next->eps : 0, .b = b, .x = x, .cos = cos, .sin = sin,
                   .qkv = b->qkv, .attn_out = b->out, .up = b->up, .down = b->down, .normed = normed, .branch = branch, .residual = residual,
                   .heads = heads, .hidden = hidden, .out = out, .attention = attention};
    RUN_TASK(threads, block_task, a);
}

void block(int threads, int n, const Block *b, const float *x, const float *cos, const float *sin, const KVView *view, float *scratch, float *out) {
    block_in_stage(threads, n, b, 0, 0, x, cos, sin, view, scratch, out);
}
