/* The few operations of a block on few rows, fused: what decoding one token at a time spends its time in.
 *
 * Compiled once on the user's machine by native.py (cc -O3 -march=native -ffp-contract=off -fopenmp), called through ctypes; where there is no
 * compiler the engine runs on torch's operators. Everything is fp32 and contiguous unless a stride is given.
 *
 * A dot product is summed in the same order whatever the number of rows, so a row's result does not depend, to the bit, on
 * the rows beside it.
 *
 * Letters: n rows, C width, H query heads, J key/value heads, D head width, M hidden width of the MLP.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
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

static void share(int all_of, int part, int parts, int *first, int *last) {
    int each = (all_of + parts - 1) / parts;
    *first = part * each < all_of ? part * each : all_of;
    *last = *first + each < all_of ? *first + each : all_of;
}

/* A matrix shared among the threads, who take some panels at a time as they find time: a core that is held up holds up
 * nobody. `next` counts the panels that are taken; it begins at 0. */
#define GRAB 8
#define SLICE 510 /* rows at a time, which stay near: whole tiles of 6 */
static void matrix(int n, int I, int O, const float *w, const float *x, long ldx, float *y, long ldy, int *next) {
    int panels = (O + PANEL - 1) / PANEL, first;
    while ((first = __atomic_fetch_add(next, GRAB, __ATOMIC_RELAXED)) < panels)
        for (int t = 0; t < n; t += SLICE)
            some_panels(n - t < SLICE ? n - t : SLICE, I, O, first, first + GRAB < panels ? first + GRAB : panels, w, x + t * ldx, ldx,
                        y + t * ldy, ldy);
}

static void norm(int C, const float *x, const float *gain, float eps, float *y) {
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
static void join(int C, int on_sum, const float *x, const float *y, const float *gain, float eps, float *out) {
    if (on_sum || !gain) {
        for (int i = 0; i < C; i++) out[i] = x[i] + y[i];
        if (gain) norm(C, out, gain, eps, out);
    } else {
        norm(C, y, gain, eps, out);
        for (int i = 0; i < C; i++) out[i] += x[i];
    }
}

/* Channels from .. to - 1 of silu(h[:M]), or silu(h[:M]) * h[M:]; y may be h. */
static void act(int from, int to, int M, int gated, const float *h, float *y) {
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

#ifdef _OPENMP
#include <omp.h>
#define TEAM _Pragma("omp parallel num_threads(threads)") { int part = omp_get_thread_num(), parts = omp_get_num_threads();
#define TOGETHER _Pragma("omp barrier")
#else
#define TEAM { int part = 0, parts = 1; (void)threads;
#define TOGETHER
#endif
#define END }

/* y = x w^T, w in panels */
void linear(int threads, int n, int I, int O, const float *x, const float *w, float *y) {
    int next = 0;
    TEAM
    (void)part, (void)parts;
    matrix(n, I, O, w, x, I, y, O, &next);
    END
}

/* A block's sizes and weights; native.py has the same fields in the same order. */
typedef struct {
    int32_t C, H, J, D, M, gated, on_sum;
    float eps;
    const float *gain1, *qkv, *qk_bias, *out, *gain2, *gain3, *up, *down, *gain4;
} Block;

static void turn(const Block *b, const float *cos, const float *sin, float *heads) {
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
static float soften(int end, float *score) {
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
static void mix(int D, int first, int end, const float *score, const float *values, float each, float *y) {
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
    for (; i + 32 <= D; i += 32) { /* as look_twice does, to the bit */
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
static void look(int D, int end, const float *query, const float *keys, const float *values, float *score, float *y) {
    float scale = 1.0f / sqrtf((float)D);
    int p = 0;
    for (; p + 4 <= end; p += 4) dots(4, D, query, keys + (long)p * D, scale, score + p);
    for (; p < end; p++) dots(1, D, query, keys + (long)p * D, scale, score + p);
    float each = soften(end, score);
    memset(y, 0, D * sizeof(float));
    mix(D, 0, end, score, values, each, y);
}

/* Two queries of one sequence, the second at a later position (first_end <= end): every key and value is loaded once for both,
 * and each sum is taken in the same order as for one. */
static void look_twice(int D, int first_end, int end, const float *a, const float *b, const float *keys, const float *values,
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
    float each_a = soften(first_end, score_a), each_b = soften(end, score_b);
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
} Seen;

/* Attention, one thread's part: rows store their keys and values, and each sees its sequence up to its position. q, k, v have row
 * strides; scores holds 2 * parts * longest floats. */
static void attention(int part, int parts, int n, int H, int J, int D, const float *q, const float *k, const float *v, long q_row, long k_row,
                      long v_row, const Seen *seen, float *scores, float *out) {
    const int64_t *owner = seen->owner, *room = seen->room, *position = seen->position;
    float **keys = seen->keys, **values = seen->values;
    for (int t = part; t < n; t += parts)
        for (int j = 0; j < J; j++) {
            long s = owner[t], at = (j * room[s] + position[t]) * D;
            memcpy(keys[s] + at, k + t * k_row + (long)j * D, D * sizeof(float));
            memcpy(values[s] + at, v + t * v_row + (long)j * D, D * sizeof(float));
        }
    TOGETHER
    float *score = scores + 2 * part * seen->longest;
    for (int u = part; u < (n + 1) / 2 * H; u += parts) { /* two rows at a time, where they are of one sequence */
        int h = u % H;
        for (int t = u / H * 2; t < n && t < u / H * 2 + 2; t++) {
            long s = owner[t], head = (long)(h / (H / J)) * room[s] * D;
            const float *query = q + t * q_row + (long)h * D;
            float *y = out + ((long)t * H + h) * D;
            if (t % 2 == 0 && t + 1 < n && owner[t + 1] == s && position[t + 1] > position[t]) {
                look_twice(D, (int)position[t] + 1, (int)position[t + 1] + 1, query, query + q_row, keys[s] + head, values[s] + head,
                           score, score + seen->longest, y, y + (long)H * D);
                break;
            }
            look(D, (int)position[t] + 1, query, keys[s] + head, values[s] + head, score, y);
        }
    }
}

/* Attention by itself; see above. */
void attend(int threads, int n, int H, int J, int D, const float *q, const float *k, const float *v, long q_row, long k_row, long v_row,
            const Seen *seen, float *scores, float *out) {
    TEAM
    attention(part, parts, n, H, J, D, q, k, v, q_row, k_row, v_row, seen, scores, out);
    END
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

/* y = silu(x) for n rows of M, or silu(x[:M]) * x[M:] where x has 2 M columns; y may be x where it has M. */
void silus(int threads, int n, int M, int gated, const float *x, float *y) {
    int U = gated ? 2 * M : M;
    TEAM
    for (int t = part; t < n; t += parts) act(0, M, M, gated, x + (long)t * U, y + (long)t * M);
    END
}

/* y = norm(x) for n rows */
void norms(int threads, int n, int C, const float *x, const float *gain, float eps, float *y) {
    TEAM
    for (int t = part; t < n; t += parts) norm(C, x + (long)t * C, gain, eps, y + (long)t * C);
    END
}

/* A branch comes home: out = n(x + y) or x + n(y), and where `next` is given, also y <- next(out), what the next branch reads. */
void joins(int threads, int n, int C, int on_sum, const float *x, float *y, const float *gain, const float *next, float eps, float *out) {
    TEAM
    for (int t = part; t < n; t += parts) {
        long at = (long)t * C;
        join(C, on_sum, x + at, y + at, gain, eps, out + at);
        if (next) norm(C, out + at, next, eps, y + at);
    }
    END
}

/* What rules compare, for n rows, in numbers (n, 4): ||step||, ||step - last||, ||last||, ||before||, where step is
 * after - before; then `last` becomes the step. NaN in `last` gives NaN. */
void measure(int threads, int n, int C, const float *before, const float *after, float *last, float *numbers) {
    TEAM
    for (int t = part; t < n; t += parts) {
        const float *b = before + (long)t * C, *a = after + (long)t * C;
        float *l = last + (long)t * C;
        v8 sums[4] = {all(0), all(0), all(0), all(0)};
        float rest[4] = {0, 0, 0, 0};
        int i = 0;
        for (; i + 8 <= C; i += 8) {
            v8 x = load(b + i), step = load(a + i) - x, old = load(l + i), turn = step - old;
            sums[0] = fma8(step, step, sums[0]), sums[1] = fma8(turn, turn, sums[1]);
            sums[2] = fma8(old, old, sums[2]), sums[3] = fma8(x, x, sums[3]);
            store(l + i, step);
        }
        for (; i < C; i++) {
            float step = a[i] - b[i], turn = step - l[i];
            rest[0] += step * step, rest[1] += turn * turn, rest[2] += l[i] * l[i], rest[3] += b[i] * b[i];
            l[i] = step;
        }
        for (int j = 0; j < 4; j++) numbers[4 * t + j] = sqrtf(total(sums[j]) + rest[j]);
    }
    END
}

/* A block on n rows of any sequences. cos and sin are (n, D) or null; work holds n * (3 C + (2 H + 2 J) D + U) + 2 threads longest floats,
 * where U is M, or 2 M for a gated MLP. */
void block(int threads, int n, const Block *b, const float *x, const float *cos, const float *sin, const Seen *seen, float *work, float *out) {
    int C = b->C, H = b->H, J = b->J, D = b->D, M = b->M, O = (H + 2 * J) * D, A = H * D, U = b->gated ? 2 * M : M;
    float *normed = work, *branch = normed + (long)n * C, *middle = branch + (long)n * C, *heads = middle + (long)n * C;
    int next[4] = {0, 0, 0, 0};
    float *attended = heads + (long)n * O, *hidden = attended + (long)n * A, *scores = hidden + (long)n * U;
    TEAM
    for (int t = part; t < n; t += parts) norm(C, x + (long)t * C, b->gain1, b->eps, normed + (long)t * C);
    TOGETHER
    matrix(n, C, O, b->qkv, normed, C, heads, O, &next[0]);
    TOGETHER
    if (b->qk_bias || cos) {
        for (int t = part; t < n; t += parts) turn(b, cos ? cos + (long)t * D : 0, sin ? sin + (long)t * D : 0, heads + (long)t * O);
        TOGETHER
    }
    attention(part, parts, n, H, J, D, heads, heads + (long)H * D, heads + (long)(H + J) * D, O, O, O, seen, scores, attended);
    TOGETHER
    matrix(n, A, C, b->out, attended, A, branch, C, &next[1]);
    TOGETHER
    for (int t = part; t < n; t += parts) {
        long at = (long)t * C;
        join(C, b->on_sum, x + at, branch + at, b->gain2, b->eps, middle + at);
        norm(C, middle + at, b->gain3, b->eps, normed + at);
    }
    TOGETHER
    matrix(n, C, U, b->up, normed, C, hidden, U, &next[2]);
    TOGETHER
    int first, last;
    share((M + 7) / 8, part, parts, &first, &last);
    first *= 8, last = 8 * last < M ? 8 * last : M;
    for (int t = 0; t < n; t++) act(first, last, M, b->gated, hidden + (long)t * U, hidden + (long)t * U);
    TOGETHER
    matrix(n, M, C, b->down, hidden, U, branch, C, &next[3]);
    TOGETHER
    for (int t = part; t < n; t += parts) {
        long at = (long)t * C;
        join(C, b->on_sum, middle + at, branch + at, b->gain4, b->eps, out + at);
    }
    END
}

/* 64-bit sums of `count` tensors' bytes, for noticing that a weight has changed. A tensor is taken in pieces, and each piece in eight lanes of
 * words: h <- P(h) ^ word with a permutation P (a round of AES, or a rotation and an odd factor). That is a bijection of h for any word and
 * of the word for any h, so a change within one word always changes the piece's sum; the pieces' sums, which depend on their places, are
 * combined by xor. Reading the memory takes longer than the arithmetic. */
#define PIECE (1 << 18)
#define LANES 8

static inline uint64_t blend(uint64_t h, uint64_t word) { return ((h << 29 | h >> 35) * 0x9E3779B97F4A7C15u) ^ word; }

#ifdef __AES__
typedef __m128i Word;
static inline Word stir(Word h, Word word) { return _mm_aesenc_si128(h, word); }
static inline Word seed_of(int j) { return _mm_set1_epi64x(j + 1); }
#else
typedef uint64_t Word;
static inline Word stir(Word h, Word word) { return blend(h, word); }
static inline Word seed_of(int j) { return j + 1; }
#endif

static uint64_t piece_sum(const unsigned char *p, int64_t bytes, uint64_t place) {
    Word h[LANES], word;
    uint64_t sum = place, halves[LANES * sizeof h[0] / 8];
    int64_t i = 0;
    for (int j = 0; j < LANES; j++) h[j] = seed_of(j);
    for (; i + (int64_t)sizeof h <= bytes; i += sizeof h)
        for (int j = 0; j < LANES; j++) memcpy(&word, p + i + j * sizeof word, sizeof word), h[j] = stir(h[j], word);
    for (int j = 0; i < bytes; i += sizeof word, j++) {
        int64_t rest = bytes - i < (int64_t)sizeof word ? bytes - i : (int64_t)sizeof word;
        memset(&word, 0, sizeof word);
        memcpy(&word, p + i, rest);
        h[j] = stir(h[j], word);
    }
    for (int j = 0; j < LANES; j++) h[j] = stir(h[j], seed_of(j));
    memcpy(halves, h, sizeof h);
    for (int j = 0; j < (int)(sizeof h / 8); j++) sum = blend(sum, halves[j]);
    sum = blend(sum, bytes);
    return sum ^ sum >> 32;
}

void fingerprints(int threads, int count, const unsigned char *const *data, const int64_t *bytes, uint64_t *sums) {
    long next = 0;
    memset(sums, 0, count * sizeof *sums);
    TEAM
    (void)part, (void)parts;
    long mine = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED), first = 0; /* the pieces of all tensors, numbered through */
    for (int t = 0; t < count; t++) {
        long pieces = (bytes[t] + PIECE - 1) / PIECE;
        for (; mine < first + pieces; mine = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) {
            int64_t at = (int64_t)(mine - first) * PIECE, size = bytes[t] - at < PIECE ? bytes[t] - at : PIECE;
            uint64_t sum = piece_sum(data[t] + at, size, (uint64_t)(mine - first));
            __atomic_fetch_xor(&sums[t], sum, __ATOMIC_RELAXED);
        }
        first += pieces;
    }
    END
}
