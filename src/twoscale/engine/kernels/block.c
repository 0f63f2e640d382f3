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

/* Adds the bias of queries and keys and applies the rotary embedding to one row of heads (H + J, D); each is optional. `sin` is signed: its
 * first half holds -sin, its second half sin. */
static void add_bias_and_rope(const Block *b, const float *cos, const float *sin, float *heads) {
    int D = b->D, half = D / 2;
    for (int h = 0; h < b->H + b->J; h++, heads += D) {
        if (b->qk_bias)
            for (int i = 0; i < D; i++) heads[i] += b->qk_bias[h * D + i];
        if (cos)
            for (int i = 0; i < half; i++) {
                float p = heads[i], q = heads[i + half];
                heads[i] = p * cos[i] + q * sin[i];
                heads[i + half] = q * cos[i + half] + p * sin[i + half];
            }
    }
}

/* Arguments of a fused block on n rows. Sizes are copied from the weights, because a task reads no other memory before its first claim. */
typedef struct {
    int n, C, M;
    int qkv_width, attn_width, up_width; /* (H + 2 J) D, H D, and M or 2 M if gated */
    int has_bias_or_rope;
    const Block *b;
    const float *x, *cos, *sin;
    Matrix qkv, attn_out, up, down;
    float *normed, *branch, *middle, *heads, *hidden, *out;
    Attention attention;
} BlockRows;

static void block_task(const void *arguments, Thread *self) {
    const BlockRows *a = arguments;
    const Block *b = a->b;
    int n = a->n, C = a->C, rows_per_claim = items_per_claim(self, n);
    Phase phase = begin_phase(self, n, rows_per_claim);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) rms_norm_row(C, a->x + (long)t * C, b->gain1, b->eps, a->normed + (long)t * C);
    if (!finish_phase(self, &phase)) return;
    if (!matmul(self, n, &a->qkv, a->normed, C, a->heads, a->qkv_width)) return;
    phase = begin_phase(self, a->has_bias_or_rope ? n : 0, rows_per_claim);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++)
            add_bias_and_rope(b, a->cos ? a->cos + (long)t * b->D : 0, a->sin ? a->sin + (long)t * b->D : 0, a->heads + (long)t * a->qkv_width);
    if (!finish_phase(self, &phase)) return;
    if (!attention(self, &a->attention)) return;
    if (!matmul(self, n, &a->attn_out, a->attention.out, a->attn_width, a->branch, C)) return;
    phase = begin_phase(self, n, rows_per_claim);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            long offset = (long)t * C;
            residual_norm_row(C, b->norm_after_add, a->x + offset, a->branch + offset, b->gain2, b->eps, a->middle + offset);
            rms_norm_row(C, a->middle + offset, b->gain3, b->eps, a->normed + offset);
        }
    if (!finish_phase(self, &phase)) return;
    if (!matmul(self, n, &a->up, a->normed, C, a->hidden, a->up_width)) return;
    phase = begin_phase(self, (a->M + 63) / 64, items_per_claim(self, (a->M + 63) / 64)); /* 64 channels of all rows */
    while (claim(self, &phase))
        for (int t = 0; t < n; t++) {
            float *h = a->hidden + (long)t * a->up_width;
            silu_row(64 * phase.first, 64 * phase.last < a->M ? 64 * phase.last : a->M, a->M, b->gated, h, h);
        }
    if (!finish_phase(self, &phase)) return;
    if (!matmul(self, n, &a->down, a->hidden, a->up_width, a->branch, C)) return;
    phase = begin_phase(self, n, rows_per_claim);
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) {
            long offset = (long)t * C;
            residual_norm_row(C, b->norm_after_add, a->middle + offset, a->branch + offset, b->gain4, b->eps, a->out + offset);
        }
    finish_phase(self, &phase);
}

/* A fused block on n rows of several sequences. cos and sin are (n, D) or null; scratch holds n * (3 C + qkv_width + attn_width + up_width)
 * + 2 threads longest floats. */
void block(int threads, int n, const Block *b, const float *x, const float *cos, const float *sin, const KVView *view, float *scratch, float *out) {
    int C = b->C, H = b->H, J = b->J, D = b->D, M = b->M;
    int qkv_width = (H + 2 * J) * D, attn_width = H * D, up_width = b->gated ? 2 * M : M;
    float *normed = scratch, *branch = normed + (long)n * C, *middle = branch + (long)n * C, *heads = middle + (long)n * C;
    float *attended = heads + (long)n * qkv_width, *hidden = attended + (long)n * attn_width, *scores = hidden + (long)n * up_width;
    const float *keys = heads + (long)H * D, *values = keys + (long)J * D;
    Attention attention = {n, H, J, D, heads, keys, values, qkv_width, qkv_width, qkv_width, view->longest, view, scores, attended};
    BlockRows a = {.n = n, .C = C, .M = M, .qkv_width = qkv_width, .attn_width = attn_width, .up_width = up_width,
                   .has_bias_or_rope = b->qk_bias || cos, .b = b, .x = x, .cos = cos, .sin = sin,
                   .qkv = b->qkv, .attn_out = b->out, .up = b->up, .down = b->down, .normed = normed, .branch = branch, .middle = middle,
                   .heads = heads, .hidden = hidden, .out = out, .attention = attention};
    RUN_TASK(threads, block_task, a);
}
