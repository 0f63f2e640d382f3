/* The operations of a transformer block, and a fused block, for decoding with few rows.
 *
 * Compiled once on the user's machine by library.py, after team.c, and called through ctypes. Without a compiler the engine uses torch's
 * operators. Everything is fp32 and contiguous unless a stride is given.
 *
 * A dot product is summed in the same order for any number of rows, so a row's result is bit-equal in every batch.
 *
 * Shapes: n rows, C width, H query heads, J key/value heads, D head width, M hidden width of the MLP.
 */

#ifdef __AVX__
#include <immintrin.h>
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

static inline v8 load(const float *p) { v8 v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, v8 v) { memcpy(p, &v, sizeof v); }
static inline v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }
static inline float horizontal_sum(v8 v) { /* ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)) */
#ifdef __AVX__
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
#else
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}
/* Four sums at once, each ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
static inline void horizontal_sums(const v8 *v, float scale, float *s) {
#ifdef __AVX__
    __m256 t = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
    _mm_storeu_ps(s, _mm_mul_ps(_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)), _mm_set1_ps(scale)));
#else
    for (int i = 0; i < 4; i++)
        s[i] = (((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) + ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]))) * scale;
#endif
}

static inline v8 blend(v8i mask, v8 a, v8 b) { return (v8)(((v8i)a & mask) | ((v8i)b & ~mask)); }

/* a b + c as one fused operation where the CPU has it. Written as an intrinsic: a compiler may fuse in one loop and not in another, and then
 * a row's last bits would depend on the number of rows. */
static inline v8 fma8(v8 a, v8 b, v8 c) {
#ifdef __FMA__
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return c + a * b;
#endif
}

/* e^x by 2^k e^r, |r| <= ln 2 / 2; within 2 units of the last place, NaN stays NaN. */
static inline v8 vexp(v8 x) {
    x = blend(x > splat(88.3f), splat(88.3f), x);
    x = blend(x < splat(-87.3f), splat(-87.3f), x);
    v8 shifted = x * splat(1.44269504f) + splat(12582912.0f); /* rounds to a whole number in the low bits */
    v8 k = shifted - splat(12582912.0f);
    v8 r = x - k * splat(0.693359375f);
    r = r - k * splat(-2.12194440e-4f);
    v8 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    v8i scale = ((v8i)shifted - (v8i)splat(12582912.0f) + 127) << 23;
    return p * (v8)scale;
}

/* Weight matrices are stored in panels of 16 outputs: w[o / 16][i][o % 16], the last panel padded with zeros. A panel is read CHUNK inputs
 * at a time, which stay in the L1 cache for all rows. A dot product is the sum of its chunks' sums, added in order. */
#define PANEL 16
#define CHUNK 256

/* Keep a vector in a register; without this the compiler loads the weights again for every row. */
#ifdef __AVX__
#define KEEP_IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define KEEP_IN_REGISTER(v) (void)(v)
#endif

/* The inner kernel: T rows of x times P panels over k inputs, for the first `n_outputs` outputs. y[t] = x[t] w, or y[t] += x[t] w with
 * `accumulate`. With three rows or more the next chunk is prefetched: the hardware prefetcher stops at page boundaries. */
#define MICRO(T, P)                                                                                                                               \
    static void micro_##T##_##P(int k, long panel, const float *w, const float *x, long ldx, float *y, long ldy, int n_outputs, int accumulate) { \
        v8 acc[T][2 * P];                                                                                                                         \
        for (int t = 0; t < T; t++)                                                                                                               \
            for (int j = 0; j < 2 * P; j++) acc[t][j] = splat(0);                                                                                 \
        for (int i = 0; i < k; i++) {                                                                                                             \
            v8 ws[2 * P];                                                                                                                         \
            if (T > 2) __builtin_prefetch(w + (i + CHUNK) * PANEL, 0, 2);                                                                         \
            for (int j = 0; j < 2 * P; j++) ws[j] = load(w + j / 2 * panel + i * PANEL + j % 2 * 8);                                              \
            if (T > 1) for (int j = 0; j < 2 * P; j++) KEEP_IN_REGISTER(ws[j]);                                                                   \
            for (int t = 0; t < T; t++) {                                                                                                         \
                v8 xs = splat(x[t * ldx + i]);                                                                                                    \
                for (int j = 0; j < 2 * P; j++) acc[t][j] = fma8(ws[j], xs, acc[t][j]);                                                           \
            }                                                                                                                                     \
        }                                                                                                                                         \
        for (int t = 0; t < T; t++)                                                                                                               \
            for (int j = 0; j < 2 * P; j++) {                                                                                                     \
                float *at = y + t * ldy + 8 * j;                                                                                                  \
                if (8 * j + 8 <= n_outputs) store(at, accumulate ? load(at) + acc[t][j] : acc[t][j]);                                             \
                else for (int o = 0; 8 * j + o < n_outputs; o++) at[o] = accumulate ? at[o] + acc[t][j][o] : acc[t][j][o];                        \
            }                                                                                                                                     \
    }
MICRO(1, 1) MICRO(1, 4) MICRO(2, 1) MICRO(2, 2) MICRO(3, 1) MICRO(4, 1) MICRO(5, 1) MICRO(6, 1)

typedef void (*Micro)(int, long, const float *, const float *, long, float *, long, int, int);

/* Panels first .. last - 1 of a matrix (O, I) for all n rows. */
static void matmul_panels(int n, int I, int O, int first, int last, const float *w, const float *x, long ldx, float *y, long ldy) {
    static const Micro single_panel[7] = {0, micro_1_1, micro_2_1, micro_3_1, micro_4_1, micro_5_1, micro_6_1};
    long panel = (long)I * PANEL;
    int tiles = (n + 5) / 6, p = first;
    while (p < last) {
        int n_panels = n == 1 ? 4 : n == 2 ? 2 : 1; /* with few rows several panels at a time: enough independent sums to hide the latency of an FMA */
        if (p + n_panels > last || (p + n_panels) * PANEL > O) n_panels = 1;
        Micro kernel = n_panels == 4 ? micro_1_4 : n_panels == 2 ? micro_2_2 : 0;
        int n_outputs = O - p * PANEL < n_panels * PANEL ? O - p * PANEL : n_panels * PANEL;
        for (int i = 0; i < I; i += CHUNK) {
            int k = I - i < CHUNK ? I - i : CHUNK;
            for (int j = 0, t = 0; j < tiles; j++) {
                int rows = (n - t) / (tiles - j);
                (kernel ? kernel : single_panel[rows])(k, panel, w + p * panel + (long)i * PANEL, x + t * ldx + i, ldx, y + t * ldy + p * PANEL, ldy, n_outputs, i > 0);
                t += rows;
            }
        }
        p += n_panels;
    }
}

/* y = x w^T in one phase. Returns 0 in a helper thread that came too late, as finish_phase does. */
#define PANELS_PER_CLAIM 8
#define MAX_ROWS 510 /* rows at a time, so that they stay in the cache: whole tiles of 6 */
static int matmul(Thread *self, int n, int I, int O, const float *w, const float *x, long ldx, float *y, long ldy) {
    Phase s = begin_phase(self, (O + PANEL - 1) / PANEL, PANELS_PER_CLAIM);
    while (claim(self, &s))
        for (int t = 0; t < n; t += MAX_ROWS)
            matmul_panels(n - t < MAX_ROWS ? n - t : MAX_ROWS, I, O, s.first, s.last, w, x + t * ldx, ldx, y + t * ldy, ldy);
    return finish_phase(self, &s);
}

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

/* y = x w^T, w in panels */
typedef struct {
    int n, I, O;
    const float *x, *w;
    float *y;
} Linear;

static void linear_task(const void *arguments, Thread *self) {
    const Linear *a = arguments;
    matmul(self, a->n, a->I, a->O, a->w, a->x, a->I, a->y, a->O);
}

void linear(int threads, int n, int I, int O, const float *x, const float *w, float *y) {
    Linear a = {n, I, O, x, w, y};
    RUN_TASK(threads, linear_task, a);
}

/* A block's sizes and weights; library.py has the same fields in the same order. The gains are those of the RMSNorms: gain1 of attention's
 * input, gain2 of its output, gain3 of the MLP's input, gain4 of its output. With norm_after_add, gain2 and gain4 apply to the sum of residual
 * and output instead; they are null in a pre-norm block. */
typedef struct {
    int32_t C, H, J, D, M, gated, norm_after_add;
    float eps;
    const float *gain1, *qkv, *qk_bias, *out, *gain2, *gain3, *up, *down, *gain4;
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

/* Dot product over the last D % 8 channels. */
static inline float dot_tail(int D, const float *query, const float *key) {
    float s = 0;
    for (int j = D - D % 8; j < D; j++) s += query[j] * key[j];
    return s;
}

/* Scores of one query against n <= 4 keys (n, D). Four independent accumulators hide the latency of an FMA. */
static inline __attribute__((always_inline)) void dots(int n, int D, const float *query, const float *keys, float scale, float *score) {
    v8 acc[4] = {splat(0), splat(0), splat(0), splat(0)};
    float sums[4];
    for (int i = 0; i + 8 <= D; i += 8) {
        v8 q = load(query + i);
        for (int k = 0; k < n; k++) acc[k] = fma8(q, load(keys + k * D + i), acc[k]);
    }
    horizontal_sums(acc, scale, sums);
    for (int k = 0; k < n; k++) score[k] = D % 8 ? sums[k] + scale * dot_tail(D, query, keys + k * D) : sums[k];
}

/* score[p] becomes e^(score[p] - max); returns 1 / their sum, by which the caller multiplies. */
static float softmax(int end, float *score) {
    float top = -INFINITY;
    v8 sum = splat(0);
    int p = 0;
    for (; p < end; p++) top = score[p] > top ? score[p] : top;
    for (p = 0; p + 8 <= end; p += 8) { v8 e = vexp(load(score + p) - splat(top)); store(score + p, e); sum += e; }
    float mass = horizontal_sum(sum);
    for (; p < end; p++) { score[p] = vexp(splat(score[p] - top))[0]; mass += score[p]; }
    return 1.0f / mass;
}

/* y = normalizer * (y + sum over p in first .. end - 1 of score[p] values[p]). */
static void weighted_sum(int D, int first, int end, const float *score, const float *values, float normalizer, float *y) {
    int i = 0, p;
    for (; i + 64 <= D; i += 64) {
        v8 acc[8];
        for (int j = 0; j < 8; j++) acc[j] = load(y + i + 8 * j);
        for (p = first; p < end; p++) {
            const float *at = values + (long)p * D + i;
            v8 weight = splat(score[p]);
            for (int j = 0; j < 8; j++) acc[j] = fma8(weight, load(at + 8 * j), acc[j]);
        }
        for (int j = 0; j < 8; j++) store(y + i + 8 * j, acc[j] * splat(normalizer));
    }
    for (; i + 32 <= D; i += 32) { /* the same order as in attend_two, to the bit */
        v8 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = load(y + i + 8 * j);
        for (p = first; p < end; p++)
            for (int j = 0; j < 4; j++) acc[j] = fma8(splat(score[p]), load(values + (long)p * D + i + 8 * j), acc[j]);
        for (int j = 0; j < 4; j++) store(y + i + 8 * j, acc[j] * splat(normalizer));
    }
    for (; i < D; i++) {
        float acc = y[i];
        for (p = first; p < end; p++) acc += score[p] * values[(long)p * D + i];
        y[i] = acc * normalizer;
    }
}

/* One query against keys and values (end, D). */
static void attend_one(int D, int end, const float *query, const float *keys, const float *values, float *score, float *y) {
    float scale = 1.0f / sqrtf((float)D);
    int p = 0;
    for (; p + 4 <= end; p += 4) dots(4, D, query, keys + (long)p * D, scale, score + p);
    for (; p < end; p++) dots(1, D, query, keys + (long)p * D, scale, score + p);
    float normalizer = softmax(end, score);
    memset(y, 0, D * sizeof(float));
    weighted_sum(D, 0, end, score, values, normalizer, y);
}

/* Two queries of one sequence, the second at a later position (first_end <= end). Every key and value is loaded once for both, and every
 * sum has the same order as in attend_one. */
static void attend_two(int D, int first_end, int end, const float *a, const float *b, const float *keys, const float *values,
                       float *score_a, float *score_b, float *y_a, float *y_b) {
    float scale = 1.0f / sqrtf((float)D);
    int p = 0, i = 0;
    for (; p + 4 <= end; p += 4) {
        const float *key = keys + (long)p * D;
        v8 acc[2][4];
        for (int k = 0; k < 4; k++) acc[0][k] = acc[1][k] = splat(0);
        for (i = 0; i + 8 <= D; i += 8) {
            v8 q = load(a + i), r = load(b + i);
            for (int k = 0; k < 4; k++) {
                v8 x = load(key + k * D + i);
                acc[0][k] = fma8(q, x, acc[0][k]), acc[1][k] = fma8(r, x, acc[1][k]);
            }
        }
        horizontal_sums(acc[0], scale, score_a + p);
        horizontal_sums(acc[1], scale, score_b + p);
        if (D % 8)
            for (int k = 0; k < 4; k++)
                score_a[p + k] += scale * dot_tail(D, a, key + k * D), score_b[p + k] += scale * dot_tail(D, b, key + k * D);
    }
    for (; p < end; p++) {
        dots(1, D, a, keys + (long)p * D, scale, score_a + p);
        dots(1, D, b, keys + (long)p * D, scale, score_b + p);
    }
    float normalizer_a = softmax(first_end, score_a), normalizer_b = softmax(end, score_b);
    for (i = 0; i + 32 <= D; i += 32) {
        v8 acc[2][4];
        for (int j = 0; j < 4; j++) acc[0][j] = acc[1][j] = splat(0);
        for (p = 0; p < first_end; p++) {
            const float *at = values + (long)p * D + i;
            v8 w = splat(score_a[p]), v = splat(score_b[p]);
            for (int j = 0; j < 4; j++) {
                v8 x = load(at + 8 * j);
                acc[0][j] = fma8(w, x, acc[0][j]), acc[1][j] = fma8(v, x, acc[1][j]);
            }
        }
        for (; p < end; p++)
            for (int j = 0; j < 4; j++) acc[1][j] = fma8(splat(score_b[p]), load(values + (long)p * D + i + 8 * j), acc[1][j]);
        for (int j = 0; j < 4; j++) store(y_a + i + 8 * j, acc[0][j] * splat(normalizer_a)), store(y_b + i + 8 * j, acc[1][j] * splat(normalizer_b));
    }
    for (; i < D; i++) {
        float s = 0, t = 0;
        for (p = 0; p < end; p++) {
            if (p < first_end) s += score_a[p] * values[(long)p * D + i];
            t += score_b[p] * values[(long)p * D + i];
        }
        y_a[i] = s * normalizer_a, y_b[i] = t * normalizer_b;
    }
}

/* Where n rows of several sequences write their keys and values, and what they attend to. Row t belongs to part p = part[t] (see rows.py) and is
 * at position[t] of its sequence, whose keys[p] and values[p] point at (J, capacity[p], D). All positions are below `longest`. */
typedef struct {
    const int64_t *part, *capacity, *position;
    float **keys, **values;
    int64_t longest;
} KVView;

/* Arguments of attention: queries, keys and values with row strides; out is (n, H, D). */
typedef struct {
    int n, H, J, D;
    const float *q, *k, *v;
    long q_row, k_row, v_row, longest;
    const KVView *view;
    float *scores; /* 2 * threads * longest floats */
    float *out;
} Attention;

/* Rows t and t + 1 for one head: in one pass over the keys if they belong to one sequence, else one by one. */
static void attend_pair(const Attention *a, int t, int h, float *score) {
    const KVView *view = a->view;
    int H = a->H, D = a->D;
    for (int end = t + 2 < a->n ? t + 2 : a->n; t < end; t++) {
        long p = view->part[t], head = (long)(h / (H / a->J)) * view->capacity[p] * D, at = view->position[t];
        const float *query = a->q + t * a->q_row + (long)h * D, *keys = view->keys[p] + head, *values = view->values[p] + head;
        float *y = a->out + ((long)t * H + h) * D;
        if (t % 2 == 0 && t + 1 < a->n && view->part[t + 1] == p && view->position[t + 1] > at) {
            attend_two(D, (int)at + 1, (int)view->position[t + 1] + 1, query, query + a->q_row, keys, values, score, score + a->longest, y,
                       y + (long)H * D);
            return;
        }
        attend_one(D, (int)at + 1, query, keys, values, score, y);
    }
}

/* Two phases: all rows write their keys and values, then each row attends to its sequence up to its own position. Returns 0
 * in a helper thread that came too late, as finish_phase does. */
static int attention(Thread *self, const Attention *a) {
    Phase s = begin_phase(self, a->n, items_per_claim(self, a->n));
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++)
            for (int j = 0; j < a->J; j++) {
                long part = a->view->part[t], at = (j * a->view->capacity[part] + a->view->position[t]) * a->D;
                memcpy(a->view->keys[part] + at, a->k + t * a->k_row + (long)j * a->D, a->D * sizeof(float));
                memcpy(a->view->values[part] + at, a->v + t * a->v_row + (long)j * a->D, a->D * sizeof(float));
            }
    if (!finish_phase(self, &s)) return 0;
    float *score = a->scores + 2 * self->index * a->longest;
    s = begin_phase(self, (a->n + 1) / 2 * a->H, items_per_claim(self, (a->n + 1) / 2 * a->H));
    while (claim(self, &s))
        for (int u = s.first; u < s.last; u++) attend_pair(a, u / a->H * 2, u % a->H, score);
    return finish_phase(self, &s);
}

static void attend_task(const void *arguments, Thread *self) { attention(self, arguments); }

/* Attention without the rest of a block. */
void attend(int threads, int n, int H, int J, int D, const float *q, const float *k, const float *v, long q_row, long k_row, long v_row,
            const KVView *view, float *scores, float *out) {
    Attention a = {n, H, J, D, q, k, v, q_row, k_row, v_row, view->longest, view, scores, out};
    RUN_TASK(threads, attend_task, a);
}

/* Kernels.settle for one token: copies its key and value at `level` of the cache (L, J, capacity, D) to the levels from .. to - 1. */
void settle(int J, int D, long capacity, long position, long level, long from, long to, float *keys, float *values) {
    long level_size = J * capacity * D;
    for (int j = 0; j < J; j++) {
        long at = (j * capacity + position) * D;
        for (long l = from; l < to; l++) {
            memcpy(keys + l * level_size + at, keys + level * level_size + at, D * sizeof(float));
            memcpy(values + l * level_size + at, values + level * level_size + at, D * sizeof(float));
        }
    }
}

/* Arguments of the row-wise kernels; each uses some of them. */
typedef struct {
    int n, C;
    int option;             /* silu: gated; residual_norm: norm_after_add */
    const float *in;        /* (n, C), silu: (n, C) or (n, 2 C); measure: before */
    const float *in2;       /* (n, C), measure only: after */
    const float *gain;      /* (C,), of the RMSNorm; null: no norm */
    const float *next_gain; /* (C,), residual_norm only: of the RMSNorm of the next branch's input; null: no such norm */
    float eps;              /* of the RMSNorms */
    float *out;             /* (n, C); measure: norms (n, 4) */
    float *in_out;          /* (n, C), residual_norm: the branch's output, then the next branch's input; measure: the last step, then this one */
} RowWise;

static void silu_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    int in_width = r->option ? 2 * r->C : r->C;
    Phase s = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++) silu_row(0, r->C, r->C, r->option, r->in + (long)t * in_width, r->out + (long)t * r->C);
    finish_phase(self, &s);
}

/* y = silu(x) for n rows of M, or silu(x[:M]) * x[M:] where x has 2 M columns; y may be x where it has M. */
void silu(int threads, int n, int M, int gated, const float *x, float *y) {
    RowWise r = {.n = n, .C = M, .option = gated, .in = x, .out = y};
    RUN_TASK(threads, silu_task, r);
}

static void rms_norm_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    Phase s = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++) rms_norm_row(r->C, r->in + (long)t * r->C, r->gain, r->eps, r->out + (long)t * r->C);
    finish_phase(self, &s);
}

/* y = RMSNorm(x) for n rows */
void rms_norm(int threads, int n, int C, const float *x, const float *gain, float eps, float *y) {
    RowWise r = {.n = n, .C = C, .in = x, .gain = gain, .eps = eps, .out = y};
    RUN_TASK(threads, rms_norm_task, r);
}

static void residual_norm_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    Phase s = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * r->C;
            residual_norm_row(r->C, r->option, r->in + at, r->in_out + at, r->gain, r->eps, r->out + at);
            if (r->next_gain) rms_norm_row(r->C, r->out + at, r->next_gain, r->eps, r->in_out + at);
        }
    finish_phase(self, &s);
}

/* Residual add and norm: out = norm(x + y) or x + norm(y). If `next_gain` is given, also y = norm(out) with that gain, the
 * next branch's input. */
void residual_norm(int threads, int n, int C, int norm_after_add, const float *x, float *y, const float *gain,
                   const float *next_gain, float eps, float *out) {
    RowWise r = {.n = n, .C = C, .option = norm_after_add, .in = x, .gain = gain, .next_gain = next_gain, .eps = eps, .out = out, .in_out = y};
    RUN_TASK(threads, residual_norm_task, r);
}

/* One row of `measure`. */
static void measure_row(int C, const float *before, const float *after, float *last, float *norms) {
    v8 sums[4] = {splat(0), splat(0), splat(0), splat(0)};
    float rest[4] = {0, 0, 0, 0};
    int i = 0;
    for (; i + 8 <= C; i += 8) {
        v8 x = load(before + i), step = load(after + i) - x, old = load(last + i), change = step - old;
        sums[0] = fma8(step, step, sums[0]), sums[1] = fma8(change, change, sums[1]);
        sums[2] = fma8(old, old, sums[2]), sums[3] = fma8(x, x, sums[3]);
        store(last + i, step);
    }
    for (; i < C; i++) {
        float step = after[i] - before[i], change = step - last[i];
        rest[0] += step * step, rest[1] += change * change, rest[2] += last[i] * last[i], rest[3] += before[i] * before[i];
        last[i] = step;
    }
    for (int j = 0; j < 4; j++) norms[j] = sqrtf(horizontal_sum(sums[j]) + rest[j]);
}

static void measure_task(const void *arguments, Thread *self) {
    const RowWise *r = arguments;
    Phase s = begin_phase(self, r->n, items_per_claim(self, r->n));
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * r->C;
            measure_row(r->C, r->in + at, r->in2 + at, r->in_out + at, r->out + 4L * t);
        }
    finish_phase(self, &s);
}

/* Norms for the exit rules, norms (n, 4): ||step||, ||step - last||, ||last||, ||before|| with step = after - before; then last = step.
 * NaN in `last` gives NaN. */
void measure(int threads, int n, int C, const float *before, const float *after, float *last, float *norms) {
    RowWise r = {.n = n, .C = C, .in = before, .in2 = after, .in_out = last, .out = norms};
    RUN_TASK(threads, measure_task, r);
}

/* Arguments of a fused block on n rows. Sizes are copied from the weights, because a task reads no other memory before its first claim. */
typedef struct {
    int n, C, M;
    int qkv_width, attn_width, up_width; /* (H + 2 J) D, H D, and M or 2 M if gated */
    int has_bias_or_rope;
    const Block *b;
    const float *x, *cos, *sin, *qkv, *attn_out, *up, *down;
    float *normed, *branch, *middle, *heads, *hidden, *out;
    Attention attention;
} BlockRows;

static void block_task(const void *arguments, Thread *self) {
    const BlockRows *a = arguments;
    const Block *b = a->b;
    int n = a->n, C = a->C, rows_per_claim = items_per_claim(self, n);
    Phase s = begin_phase(self, n, rows_per_claim);
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++) rms_norm_row(C, a->x + (long)t * C, b->gain1, b->eps, a->normed + (long)t * C);
    if (!finish_phase(self, &s)) return;
    if (!matmul(self, n, C, a->qkv_width, a->qkv, a->normed, C, a->heads, a->qkv_width)) return;
    s = begin_phase(self, a->has_bias_or_rope ? n : 0, rows_per_claim);
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++)
            add_bias_and_rope(b, a->cos ? a->cos + (long)t * b->D : 0, a->sin ? a->sin + (long)t * b->D : 0, a->heads + (long)t * a->qkv_width);
    if (!finish_phase(self, &s)) return;
    if (!attention(self, &a->attention)) return;
    if (!matmul(self, n, a->attn_width, C, a->attn_out, a->attention.out, a->attn_width, a->branch, C)) return;
    s = begin_phase(self, n, rows_per_claim);
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * C;
            residual_norm_row(C, b->norm_after_add, a->x + at, a->branch + at, b->gain2, b->eps, a->middle + at);
            rms_norm_row(C, a->middle + at, b->gain3, b->eps, a->normed + at);
        }
    if (!finish_phase(self, &s)) return;
    if (!matmul(self, n, C, a->up_width, a->up, a->normed, C, a->hidden, a->up_width)) return;
    s = begin_phase(self, (a->M + 63) / 64, items_per_claim(self, (a->M + 63) / 64)); /* 64 channels of all rows */
    while (claim(self, &s))
        for (int t = 0; t < n; t++) {
            float *h = a->hidden + (long)t * a->up_width;
            silu_row(64 * s.first, 64 * s.last < a->M ? 64 * s.last : a->M, a->M, b->gated, h, h);
        }
    if (!finish_phase(self, &s)) return;
    if (!matmul(self, n, a->M, C, a->down, a->hidden, a->up_width, a->branch, C)) return;
    s = begin_phase(self, n, rows_per_claim);
    while (claim(self, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * C;
            residual_norm_row(C, b->norm_after_add, a->middle + at, a->branch + at, b->gain4, b->eps, a->out + at);
        }
    finish_phase(self, &s);
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
