/* The few operations of a block on few rows, fused: what decoding one token at a time spends its time in.
 *
 * Compiled once on the user's machine by library.py, after team.c, and called through ctypes; where there is no compiler the engine runs on
 * torch's operators. Everything is fp32 and contiguous unless a stride is given.
 *
 * A dot product is summed in the same order whatever the number of rows, so a row's result does not depend, to the bit, on
 * the rows beside it.
 *
 * Letters: n rows, C width, H query heads, J key/value heads, D head width, M hidden width of the MLP.
 */

#ifdef __AVX__
#include <immintrin.h>
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

static inline v8 load(const float *p) { v8 v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, v8 v) { memcpy(p, &v, sizeof v); }
static inline v8 all(float x) { return (v8){x, x, x, x, x, x, x, x}; }
static inline float total(v8 v) { /* ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)) */
#ifdef __AVX__
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
#else
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}
/* Four sums at once, each ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
static inline void totals(const v8 *v, float scale, float *s) {
#ifdef __AVX__
    __m256 t = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
    _mm_storeu_ps(s, _mm_mul_ps(_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)), _mm_set1_ps(scale)));
#else
    for (int i = 0; i < 4; i++)
        s[i] = (((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) + ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]))) * scale;
#endif
}

static inline v8 pick(v8i mask, v8 a, v8 b) { return (v8)(((v8i)a & mask) | ((v8i)b & ~mask)); }

/* a b + c. Said outright, because compilers fuse or part the two as they see fit in each loop, and then a row's last bits
 * would depend on how many rows there are. */
static inline v8 fma8(v8 a, v8 b, v8 c) {
#ifdef __FMA__
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return c + a * b;
#endif
}

/* e^x by 2^k e^r, |r| <= ln 2 / 2; within 2 units of the last place, NaN stays NaN. */
static inline v8 vexp(v8 x) {
    x = pick(x > all(88.3f), all(88.3f), x);
    x = pick(x < all(-87.3f), all(-87.3f), x);
    v8 shifted = x * all(1.44269504f) + all(12582912.0f); /* rounds to a whole number in the low bits */
    v8 k = shifted - all(12582912.0f);
    v8 r = x - k * all(0.693359375f);
    r = r - k * all(-2.12194440e-4f);
    v8 p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    v8i scale = ((v8i)shifted - (v8i)all(12582912.0f) + 127) << 23;
    return p * (v8)scale;
}

/* Matrices come in panels of 16 outputs: w[o / 16][i][o % 16], the last one padded with zeros. A panel is taken CHUNK inputs at
 * a time, which stay in the nearest cache while all rows pass; a sum is its chunks' sums, added in order. */
#define PANEL 16
#define CHUNK 256

/* Hold a vector in a register: left alone, the compiler loads a weight again for every row that meets it. */
#ifdef __AVX__
#define KEEP(v) __asm__("" : "+x"(v))
#else
#define KEEP(v) (void)(v)
#endif

/* T rows of x against P panels, k inputs: y[t] (+)= x[t] w, for the first `wide` outputs. With three rows or more there is time to
 * ask for the next chunk meanwhile: the processor's own prefetching stops at every page, and the first tile would wait. */
#define MICRO(T, P)                                                                                                    \
    static void micro_##T##_##P(int k, long panel, const float *w, const float *x, long ldx, float *y, long ldy, int wide, int more) { \
        v8 acc[T][2 * P];                                                                                              \
        for (int t = 0; t < T; t++)                                                                                    \
            for (int j = 0; j < 2 * P; j++) acc[t][j] = all(0);                                                        \
        for (int i = 0; i < k; i++) {                                                                                  \
            v8 ws[2 * P];                                                                                              \
            if (T > 2) __builtin_prefetch(w + (i + CHUNK) * PANEL, 0, 2);                                              \
            for (int j = 0; j < 2 * P; j++) ws[j] = load(w + j / 2 * panel + i * PANEL + j % 2 * 8);                   \
            if (T > 1) for (int j = 0; j < 2 * P; j++) KEEP(ws[j]);                                                    \
            for (int t = 0; t < T; t++) {                                                                              \
                v8 xs = all(x[t * ldx + i]);                                                                           \
                for (int j = 0; j < 2 * P; j++) acc[t][j] = fma8(ws[j], xs, acc[t][j]);                                \
            }                                                                                                          \
        }                                                                                                              \
        for (int t = 0; t < T; t++)                                                                                    \
            for (int j = 0; j < 2 * P; j++) {                                                                          \
                float *at = y + t * ldy + 8 * j;                                                                       \
                if (8 * j + 8 <= wide) store(at, more ? load(at) + acc[t][j] : acc[t][j]);                             \
                else for (int o = 0; 8 * j + o < wide; o++) at[o] = more ? at[o] + acc[t][j][o] : acc[t][j][o];        \
            }                                                                                                          \
    }
MICRO(1, 1) MICRO(1, 4) MICRO(2, 1) MICRO(2, 2) MICRO(3, 1) MICRO(4, 1) MICRO(5, 1) MICRO(6, 1)

typedef void (*Micro)(int, long, const float *, const float *, long, float *, long, int, int);

/* Panels first .. last - 1 of a matrix (O, I) for all n rows. */
static void some_panels(int n, int I, int O, int first, int last, const float *w, const float *x, long ldx, float *y, long ldy) {
    static const Micro one[7] = {0, micro_1_1, micro_2_1, micro_3_1, micro_4_1, micro_5_1, micro_6_1};
    long panel = (long)I * PANEL;
    int tiles = (n + 5) / 6, p = first;
    while (p < last) {
        int several = n == 1 ? 4 : n == 2 ? 2 : 1; /* few rows take several panels at a time, to have enough sums under way */
        if (p + several > last || (p + several) * PANEL > O) several = 1;
        Micro step = several == 4 ? micro_1_4 : several == 2 ? micro_2_2 : 0;
        int wide = O - p * PANEL < several * PANEL ? O - p * PANEL : several * PANEL;
        for (int i = 0; i < I; i += CHUNK) {
            int k = I - i < CHUNK ? I - i : CHUNK;
            for (int j = 0, t = 0; j < tiles; j++) {
                int rows = (n - t) / (tiles - j);
                (step ? step : one[rows])(k, panel, w + p * panel + (long)i * PANEL, x + t * ldx + i, ldx, y + t * ldy + p * PANEL, ldy, wide, i > 0);
                t += rows;
            }
        }
        p += several;
    }
}

/* y = x w^T: one phase, GRAB panels at a time. Returns 0 where the call is over. */
#define GRAB 8
#define SLICE 510 /* rows at a time, which stay near: whole tiles of 6 */
static int matrix(Member *me, int n, int I, int O, const float *w, const float *x, long ldx, float *y, long ldy) {
    Span s = phase(me, (O + PANEL - 1) / PANEL, GRAB);
    while (claim(me, &s))
        for (int t = 0; t < n; t += SLICE)
            some_panels(n - t < SLICE ? n - t : SLICE, I, O, s.first, s.last, w, x + t * ldx, ldx, y + t * ldy, ldy);
    return settled(me, &s);
}

static void rms_norm_row(int C, const float *x, const float *gain, float eps, float *y) {
    v8 sum = all(0);
    int i = 0;
    for (; i + 8 <= C; i += 8) { v8 v = load(x + i); sum += v * v; }
    float s = total(sum);
    for (; i < C; i++) s += x[i] * x[i];
    float scale = 1.0f / sqrtf(s / C + eps);
    for (i = 0; i + 8 <= C; i += 8) store(y + i, load(x + i) * all(scale) * load(gain + i));
    for (; i < C; i++) y[i] = x[i] * scale * gain[i];
}

/* x <- n(x + y), or x + n(y); without a gain there is no norm */
static void residual_norm_row(int C, int on_sum, const float *x, const float *y, const float *gain, float eps, float *out) {
    if (on_sum || !gain) {
        for (int i = 0; i < C; i++) out[i] = x[i] + y[i];
        if (gain) rms_norm_row(C, out, gain, eps, out);
    } else {
        rms_norm_row(C, y, gain, eps, out);
        for (int i = 0; i < C; i++) out[i] += x[i];
    }
}

/* Channels from .. to - 1 of silu(h[:M]), or silu(h[:M]) * h[M:]; y may be h. */
static void silu_row(int from, int to, int M, int gated, const float *h, float *y) {
    int i = from;
    for (; i + 8 <= to; i += 8) {
        v8 x = load(h + i), s = x / (all(1.0f) + vexp(-x));
        store(y + i, gated ? s * load(h + M + i) : s);
    }
    for (; i < to; i++) {
        float s = h[i] / (1.0f + vexp(all(-h[i]))[0]);
        y[i] = gated ? s * h[M + i] : s;
    }
}

/* y = x w^T, w in panels */
typedef struct {
    int n, I, O;
    const float *x, *w;
    float *y;
} Linear;

static void linear_task(const void *arguments, Member *me) {
    const Linear *a = arguments;
    matrix(me, a->n, a->I, a->O, a->w, a->x, a->I, a->y, a->O);
}

void linear(int threads, int n, int I, int O, const float *x, const float *w, float *y) {
    Linear a = {n, I, O, x, w, y};
    RUN(threads, linear_task, a);
}

/* A block's sizes and weights; library.py has the same fields in the same order. */
typedef struct {
    int32_t C, H, J, D, M, gated, on_sum;
    float eps;
    const float *gain1, *qkv, *qk_bias, *out, *gain2, *gain3, *up, *down, *gain4;
} Block;

static void rope(const Block *b, const float *cos, const float *sin, float *heads) {
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

/* What the last D % 8 channels add to a score. */
static inline float tail(int D, const float *query, const float *key) {
    float s = 0;
    for (int j = D - D % 8; j < D; j++) s += query[j] * key[j];
    return s;
}

/* A query against the n keys (n, D) from p on, n up to 4: several sums at a time, because one has to wait for itself. */
static inline __attribute__((always_inline)) void dots(int n, int D, const float *query, const float *keys, float scale, float *score) {
    v8 acc[4] = {all(0), all(0), all(0), all(0)};
    float sums[4];
    for (int i = 0; i + 8 <= D; i += 8) {
        v8 q = load(query + i);
        for (int k = 0; k < n; k++) acc[k] = fma8(q, load(keys + k * D + i), acc[k]);
    }
    totals(acc, scale, sums);
    for (int k = 0; k < n; k++) score[k] = D % 8 ? sums[k] + scale * tail(D, query, keys + k * D) : sums[k];
}

/* Scores (end) to weights that sum to 1 / the returned number. */
static float softmax(int end, float *score) {
    float top = -INFINITY;
    v8 sum = all(0);
    int p = 0;
    for (; p < end; p++) top = score[p] > top ? score[p] : top;
    for (p = 0; p + 8 <= end; p += 8) { v8 e = vexp(load(score + p) - all(top)); store(score + p, e); sum += e; }
    float mass = total(sum);
    for (; p < end; p++) { score[p] = vexp(all(score[p] - top))[0]; mass += score[p]; }
    return 1.0f / mass;
}

/* y = each * sum over p of score[p] values[p], from `first` on; y holds what came before. */
static void weighted_sum(int D, int first, int end, const float *score, const float *values, float each, float *y) {
    int i = 0, p;
    for (; i + 64 <= D; i += 64) {
        v8 acc[8];
        for (int j = 0; j < 8; j++) acc[j] = load(y + i + 8 * j);
        for (p = first; p < end; p++) {
            const float *at = values + (long)p * D + i;
            v8 weight = all(score[p]);
            for (int j = 0; j < 8; j++) acc[j] = fma8(weight, load(at + 8 * j), acc[j]);
        }
        for (int j = 0; j < 8; j++) store(y + i + 8 * j, acc[j] * all(each));
    }
    for (; i + 32 <= D; i += 32) { /* the same order as in attend_two, to the bit */
        v8 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = load(y + i + 8 * j);
        for (p = first; p < end; p++)
            for (int j = 0; j < 4; j++) acc[j] = fma8(all(score[p]), load(values + (long)p * D + i + 8 * j), acc[j]);
        for (int j = 0; j < 4; j++) store(y + i + 8 * j, acc[j] * all(each));
    }
    for (; i < D; i++) {
        float acc = y[i];
        for (p = first; p < end; p++) acc += score[p] * values[(long)p * D + i];
        y[i] = acc * each;
    }
}

/* One query against keys and values (end, D). */
static void attend_one(int D, int end, const float *query, const float *keys, const float *values, float *score, float *y) {
    float scale = 1.0f / sqrtf((float)D);
    int p = 0;
    for (; p + 4 <= end; p += 4) dots(4, D, query, keys + (long)p * D, scale, score + p);
    for (; p < end; p++) dots(1, D, query, keys + (long)p * D, scale, score + p);
    float each = softmax(end, score);
    memset(y, 0, D * sizeof(float));
    weighted_sum(D, 0, end, score, values, each, y);
}

/* Two queries of one sequence, the second at a later position (first_end <= end): every key and value is loaded once for both,
 * and each sum is taken in the same order as for one. */
static void attend_two(int D, int first_end, int end, const float *a, const float *b, const float *keys, const float *values,
                       float *score_a, float *score_b, float *y_a, float *y_b) {
    float scale = 1.0f / sqrtf((float)D);
    int p = 0, i = 0;
    for (; p + 4 <= end; p += 4) {
        const float *key = keys + (long)p * D;
        v8 acc[2][4];
        for (int k = 0; k < 4; k++) acc[0][k] = acc[1][k] = all(0);
        for (i = 0; i + 8 <= D; i += 8) {
            v8 q = load(a + i), r = load(b + i);
            for (int k = 0; k < 4; k++) {
                v8 x = load(key + k * D + i);
                acc[0][k] = fma8(q, x, acc[0][k]), acc[1][k] = fma8(r, x, acc[1][k]);
            }
        }
        totals(acc[0], scale, score_a + p);
        totals(acc[1], scale, score_b + p);
        if (D % 8)
            for (int k = 0; k < 4; k++)
                score_a[p + k] += scale * tail(D, a, key + k * D), score_b[p + k] += scale * tail(D, b, key + k * D);
    }
    for (; p < end; p++) {
        dots(1, D, a, keys + (long)p * D, scale, score_a + p);
        dots(1, D, b, keys + (long)p * D, scale, score_b + p);
    }
    float each_a = softmax(first_end, score_a), each_b = softmax(end, score_b);
    for (i = 0; i + 32 <= D; i += 32) {
        v8 acc[2][4];
        for (int j = 0; j < 4; j++) acc[0][j] = acc[1][j] = all(0);
        for (p = 0; p < first_end; p++) {
            const float *at = values + (long)p * D + i;
            v8 w = all(score_a[p]), v = all(score_b[p]);
            for (int j = 0; j < 4; j++) {
                v8 x = load(at + 8 * j);
                acc[0][j] = fma8(w, x, acc[0][j]), acc[1][j] = fma8(v, x, acc[1][j]);
            }
        }
        for (; p < end; p++)
            for (int j = 0; j < 4; j++) acc[1][j] = fma8(all(score_b[p]), load(values + (long)p * D + i + 8 * j), acc[1][j]);
        for (int j = 0; j < 4; j++) store(y_a + i + 8 * j, acc[0][j] * all(each_a)), store(y_b + i + 8 * j, acc[1][j] * all(each_b));
    }
    for (; i < D; i++) {
        float s = 0, t = 0;
        for (p = 0; p < end; p++) {
            if (p < first_end) s += score_a[p] * values[(long)p * D + i];
            t += score_b[p] * values[(long)p * D + i];
        }
        y_a[i] = s * each_a, y_b[i] = t * each_b;
    }
}

/* Where n rows of any sequences store their keys and values, and what they see: row t is at position[t] of sequence s = owner[t], whose
 * keys[s] and values[s] point at (J, room[s], D); no position is `longest` or beyond. */
typedef struct {
    const int64_t *owner, *room, *position;
    float **keys, **values;
    int64_t longest;
} KVView;

/* Queries, keys and values with row strides, and where the result goes: (n, H, D). */
typedef struct {
    int n, H, J, D;
    const float *q, *k, *v;
    long q_row, k_row, v_row, longest;
    const KVView *view;
    float *scores; /* 2 * threads * longest floats */
    float *out;
} Attention;

/* Rows t and t + 1 under one head: together where they are of one sequence, each by itself otherwise. */
static void attend_pair(const Attention *a, int t, int h, float *score) {
    const KVView *view = a->view;
    int H = a->H, D = a->D;
    for (int end = t + 2 < a->n ? t + 2 : a->n; t < end; t++) {
        long s = view->owner[t], head = (long)(h / (H / a->J)) * view->room[s] * D, at = view->position[t];
        const float *query = a->q + t * a->q_row + (long)h * D, *keys = view->keys[s] + head, *values = view->values[s] + head;
        float *y = a->out + ((long)t * H + h) * D;
        if (t % 2 == 0 && t + 1 < a->n && view->owner[t + 1] == s && view->position[t + 1] > at) {
            attend_two(D, (int)at + 1, (int)view->position[t + 1] + 1, query, query + a->q_row, keys, values, score, score + a->longest, y,
                       y + (long)H * D);
            return;
        }
        attend_one(D, (int)at + 1, query, keys, values, score, y);
    }
}

/* Two phases: rows store their keys and values, then each sees its sequence up to its position. Returns 0 where the call is over. */
static int attention(Member *me, const Attention *a) {
    Span s = phase(me, a->n, several(me, a->n));
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++)
            for (int j = 0; j < a->J; j++) {
                long owner = a->view->owner[t], at = (j * a->view->room[owner] + a->view->position[t]) * a->D;
                memcpy(a->view->keys[owner] + at, a->k + t * a->k_row + (long)j * a->D, a->D * sizeof(float));
                memcpy(a->view->values[owner] + at, a->v + t * a->v_row + (long)j * a->D, a->D * sizeof(float));
            }
    if (!settled(me, &s)) return 0;
    float *score = a->scores + 2 * me->part * a->longest;
    s = phase(me, (a->n + 1) / 2 * a->H, several(me, (a->n + 1) / 2 * a->H));
    while (claim(me, &s))
        for (int u = s.first; u < s.last; u++) attend_pair(a, u / a->H * 2, u % a->H, score);
    return settled(me, &s);
}

static void attend_task(const void *arguments, Member *me) { attention(me, arguments); }

/* Attention by itself; see above. */
void attend(int threads, int n, int H, int J, int D, const float *q, const float *k, const float *v, long q_row, long k_row, long v_row,
            const KVView *view, float *scores, float *out) {
    Attention a = {n, H, J, D, q, k, v, q_row, k_row, v_row, view->longest, view, scores, out};
    RUN(threads, attend_task, a);
}

/* What a row wrote at `level` of keys and values (L, J, room, D) becomes what levels from .. to - 1 hold at its position. */
void settle(int J, int D, long room, long position, long level, long from, long to, float *keys, float *values) {
    long step = J * room * D;
    for (int j = 0; j < J; j++) {
        long at = (j * room + position) * D;
        for (long l = from; l < to; l++) {
            memcpy(keys + l * step + at, keys + level * step + at, D * sizeof(float));
            memcpy(values + l * step + at, values + level * step + at, D * sizeof(float));
        }
    }
}

/* What the kernels on single rows take; each uses some of it. */
typedef struct {
    int n, C, flag;
    const float *x, *y, *gain, *next;
    float eps;
    float *a, *b;
} RowWise;

static void silu_task(const void *arguments, Member *me) {
    const RowWise *r = arguments;
    int U = r->flag ? 2 * r->C : r->C;
    Span s = phase(me, r->n, several(me, r->n));
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) silu_row(0, r->C, r->C, r->flag, r->x + (long)t * U, r->a + (long)t * r->C);
    settled(me, &s);
}

/* y = silu(x) for n rows of M, or silu(x[:M]) * x[M:] where x has 2 M columns; y may be x where it has M. */
void silu(int threads, int n, int M, int gated, const float *x, float *y) {
    RowWise r = {.n = n, .C = M, .flag = gated, .x = x, .a = y};
    RUN(threads, silu_task, r);
}

static void rms_norm_task(const void *arguments, Member *me) {
    const RowWise *r = arguments;
    Span s = phase(me, r->n, several(me, r->n));
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) rms_norm_row(r->C, r->x + (long)t * r->C, r->gain, r->eps, r->a + (long)t * r->C);
    settled(me, &s);
}

/* y = RMSNorm(x) for n rows */
void rms_norm(int threads, int n, int C, const float *x, const float *gain, float eps, float *y) {
    RowWise r = {.n = n, .C = C, .x = x, .gain = gain, .eps = eps, .a = y};
    RUN(threads, rms_norm_task, r);
}

static void residual_norm_task(const void *arguments, Member *me) {
    const RowWise *r = arguments;
    Span s = phase(me, r->n, several(me, r->n));
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * r->C;
            residual_norm_row(r->C, r->flag, r->x + at, r->b + at, r->gain, r->eps, r->a + at);
            if (r->next) rms_norm_row(r->C, r->a + at, r->next, r->eps, r->b + at);
        }
    settled(me, &s);
}

/* Residual add and norm: out = n(x + y) or x + n(y), and where `next` is given, also y <- next(out), what the next branch reads. */
void residual_norm(int threads, int n, int C, int on_sum, const float *x, float *y, const float *gain, const float *next, float eps, float *out) {
    RowWise r = {.n = n, .C = C, .flag = on_sum, .x = x, .gain = gain, .next = next, .eps = eps, .a = out, .b = y};
    RUN(threads, residual_norm_task, r);
}

/* One row of `measure`. */
static void measure_row(int C, const float *before, const float *after, float *last, float *numbers) {
    v8 sums[4] = {all(0), all(0), all(0), all(0)};
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
    for (int j = 0; j < 4; j++) numbers[j] = sqrtf(total(sums[j]) + rest[j]);
}

static void measure_task(const void *arguments, Member *me) {
    const RowWise *r = arguments;
    Span s = phase(me, r->n, several(me, r->n));
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * r->C;
            measure_row(r->C, r->x + at, r->y + at, r->a + at, r->b + 4L * t);
        }
    settled(me, &s);
}

/* What rules compare, for n rows, in numbers (n, 4): ||step||, ||step - last||, ||last||, ||before||, where step is
 * after - before; then `last` becomes the step. NaN in `last` gives NaN. */
void measure(int threads, int n, int C, const float *before, const float *after, float *last, float *numbers) {
    RowWise r = {.n = n, .C = C, .x = before, .y = after, .a = last, .b = numbers};
    RUN(threads, measure_task, r);
}

/* A block on n rows; sizes are copied, because a task reads no other memory before its first claim. */
typedef struct {
    int n, C, O, A, M, U, rotated;
    const Block *b;
    const float *x, *cos, *sin, *qkv, *wo, *up, *down;
    float *normed, *branch, *middle, *heads, *hidden, *out;
    Attention attention;
} BlockRows;

static void block_task(const void *arguments, Member *me) {
    const BlockRows *a = arguments;
    const Block *b = a->b;
    int n = a->n, C = a->C, rows = several(me, n);
    Span s = phase(me, n, rows);
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) rms_norm_row(C, a->x + (long)t * C, b->gain1, b->eps, a->normed + (long)t * C);
    if (!settled(me, &s)) return;
    if (!matrix(me, n, C, a->O, a->qkv, a->normed, C, a->heads, a->O)) return;
    s = phase(me, a->rotated ? n : 0, rows);
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++)
            rope(b, a->cos ? a->cos + (long)t * b->D : 0, a->sin ? a->sin + (long)t * b->D : 0, a->heads + (long)t * a->O);
    if (!settled(me, &s)) return;
    if (!attention(me, &a->attention)) return;
    if (!matrix(me, n, a->A, C, a->wo, a->attention.out, a->A, a->branch, C)) return;
    s = phase(me, n, rows);
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * C;
            residual_norm_row(C, b->on_sum, a->x + at, a->branch + at, b->gain2, b->eps, a->middle + at);
            rms_norm_row(C, a->middle + at, b->gain3, b->eps, a->normed + at);
        }
    if (!settled(me, &s)) return;
    if (!matrix(me, n, C, a->U, a->up, a->normed, C, a->hidden, a->U)) return;
    s = phase(me, (a->M + 63) / 64, several(me, (a->M + 63) / 64)); /* 64 channels of all rows */
    while (claim(me, &s))
        for (int t = 0; t < n; t++) {
            float *h = a->hidden + (long)t * a->U;
            silu_row(64 * s.first, 64 * s.last < a->M ? 64 * s.last : a->M, a->M, b->gated, h, h);
        }
    if (!settled(me, &s)) return;
    if (!matrix(me, n, a->M, C, a->down, a->hidden, a->U, a->branch, C)) return;
    s = phase(me, n, rows);
    while (claim(me, &s))
        for (int t = s.first; t < s.last; t++) {
            long at = (long)t * C;
            residual_norm_row(C, b->on_sum, a->middle + at, a->branch + at, b->gain4, b->eps, a->out + at);
        }
    settled(me, &s);
}

/* A block on n rows of any sequences. cos and sin are (n, D) or null; work holds n * (3 C + (2 H + 2 J) D + U) + 2 threads longest floats,
 * where U is M, or 2 M for a gated MLP. */
void block(int threads, int n, const Block *b, const float *x, const float *cos, const float *sin, const KVView *view, float *work, float *out) {
    int C = b->C, H = b->H, J = b->J, D = b->D, M = b->M, O = (H + 2 * J) * D, A = H * D, U = b->gated ? 2 * M : M;
    float *normed = work, *branch = normed + (long)n * C, *middle = branch + (long)n * C, *heads = middle + (long)n * C;
    float *attended = heads + (long)n * O, *hidden = attended + (long)n * A, *scores = hidden + (long)n * U;
    const float *keys = heads + (long)H * D, *values = keys + (long)J * D;
    Attention attention = {n, H, J, D, heads, keys, values, O, O, O, view->longest, view, scores, attended};
    BlockRows a = {.n = n, .C = C, .O = O, .A = A, .M = M, .U = U, .rotated = b->qk_bias || cos, .b = b, .x = x, .cos = cos, .sin = sin,
                   .qkv = b->qkv, .wo = b->out, .up = b->up, .down = b->down, .normed = normed, .branch = branch, .middle = middle,
                   .heads = heads, .hidden = hidden, .out = out, .attention = attention};
    RUN(threads, block_task, a);
}
