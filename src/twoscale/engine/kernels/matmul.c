/* Matrix products: weights in panels, in four formats; micro kernels for few rows.
 *
 * Weight matrices are stored in panels of 16 outputs: w[o / 16][i][o % 16], the last panel padded with zeros. A panel is read in
 * blocks of INPUT_BLOCK inputs, which stay in the L1 cache for all rows. A dot product is the sum of its blocks' sums, added in order.
 *
 * FP32, BF16  the weights themselves
 * INT8        int8 values, with a scale for each output and input block: the sum of a block is multiplied by it
 * W8A8        as INT8, and the inputs are quantized to int8 too, with a scale for each row and input block. Four inputs of an output lie side
 *             by side: w[o / 16][i / 4][o % 16][i % 4]. The sum of a block is an exact integer, whatever instructions compute it.
 *
 * With the first three the inputs are fp32 and weights become fp32 before they are multiplied, which is exact.
 */
#define PANEL 16
#define INPUT_BLOCK 256 /* inputs, in every format; in int8 and w8a8 they share a scale: SCALE_BLOCK in model/quantized.py */

enum { FP32, BF16, INT8, W8A8 };

/* A weight matrix (O, I); library.py has the same fields in the same order. */
typedef struct {
    const void *panels;
    const float *scales; /* (panels, input blocks, 16); null for FP32 and BF16 */
    int32_t O, I, format;
} Matrix;

/* Keep a vector in a register; without this the compiler loads the weights again for every row. */
#ifdef __AVX__
#define KEEP_IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define KEEP_IN_REGISTER(v) (void)(v)
#endif
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int8_t s8x8 __attribute__((vector_size(8)));

/* Eight numbers of a format (weights, or keys and values) from index i on, as fp32. */
INLINE v8 load_as_fp32(int format, const void *w, long i) {
    if (format == BF16) {
#ifdef __AVX2__
        return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)w + i))), 16);
#else
        u16x8 v;
        memcpy(&v, (const uint16_t *)w + i, sizeof v);
        return (v8)(__builtin_convertvector(v, u32x8) << 16);
#endif
    }
    if (format == INT8) {
#ifdef __AVX2__
        __m128i v = _mm_loadl_epi64((const __m128i *)((const int8_t *)w + i));
        return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
#else
        s8x8 v;
        memcpy(&v, (const int8_t *)w + i, sizeof v);
        return __builtin_convertvector(__builtin_convertvector(v, v8i), v8);
#endif
    }
    return load((const float *)w + i);
}

/* Bytes of a number. */
INLINE int format_bytes(int format) { return format == FP32 ? 4 : format == BF16 ? 2 : 1; }

/* Adds the sum of a block of inputs to eight outputs, or stores it if the block is the first one; only `room` outputs exist from y on. */
INLINE void add_to_outputs(float *y, v8 sum, int room, int accumulate) {
    if (room >= 8) store(y, accumulate ? load(y) + sum : sum);
    else for (int o = 0; o < room; o++) y[o] = accumulate ? y[o] + sum[o] : sum[o];
}

/* The inner kernel: T rows of x times P panels over the k inputs of an input block, for the first `n_outputs` outputs. y[t] = x[t] w, or
 * y[t] += x[t] w with `accumulate`. `panel_stride` and `scale_stride` are the distances of panels, in weights and scales. With three rows or more
 * the next input block is prefetched: the hardware prefetcher stops at page boundaries. */
#define MICRO_ARGUMENTS int k, long panel_stride, const void *w, const float *scales, long scale_stride, const float *x, long ldx, float *y, long ldy, int n_outputs, int accumulate
INLINE void micro(const int format, const int T, const int P, MICRO_ARGUMENTS) {
    v8 acc[6][8]; /* [T][2 P]; of constant size, so that the compiler keeps them in registers */
    for (int t = 0; t < T; t++)
        for (int j = 0; j < 2 * P; j++) acc[t][j] = splat(0);
    for (int i = 0; i < k; i++) {
        v8 ws[8];
        if (T > 2 && i % (4 / format_bytes(format)) == 0) __builtin_prefetch((const char *)w + (long)(i + INPUT_BLOCK) * PANEL * format_bytes(format), 0, 2);
        for (int j = 0; j < 2 * P; j++) {
            ws[j] = load_as_fp32(format, w, j / 2 * panel_stride + i * PANEL + j % 2 * 8);
            if (T == 1) acc[0][j] = fma8(ws[j], splat(x[i]), acc[0][j]);
        }
        if (T == 1) continue;
        if (T > 1) for (int j = 0; j < 2 * P; j++) KEEP_IN_REGISTER(ws[j]);
        for (int t = 0; t < T; t++) {
            v8 xs = splat(x[t * ldx + i]);
            for (int j = 0; j < 2 * P; j++) acc[t][j] = fma8(ws[j], xs, acc[t][j]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int j = 0; j < 2 * P; j++) {
            v8 sum = scales ? acc[t][j] * load(scales + j / 2 * scale_stride + j % 2 * 8) : acc[t][j];
            add_to_outputs(y + t * ldy + 8 * j, sum, n_outputs - 8 * j, accumulate);
        }
}

/* Quantized inputs: T rows at distances of ldq; their scales at distances of ldscale. */
#define MICRO_W8A8_ARGUMENTS int k, long panel_stride, const int8_t *w, const float *scales, long scale_stride, const int8_t *q, long ldq, const float *q_scales, long ldscale, float *y, long ldy, int n_outputs, int accumulate

/* sum + the products of four inputs with their weights of eight outputs (8, 4). */
INLINE v8i dot4(v8i sum, const int8_t *w, const int8_t *q) {
#ifdef __AVX2__
    int32_t four;
    memcpy(&four, q, 4);
    __m256i inputs = _mm256_set1_epi32(four), weights = _mm256_sign_epi8(_mm256_loadu_si256((const __m256i *)w), inputs), positive = _mm256_abs_epi8(inputs);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (v8i)_mm256_dpbusd_epi32((__m256i)sum, positive, weights);
#else /* pairs of products fit 16 bits, 2 x 127 x 127 at most */
    return sum + (v8i)_mm256_madd_epi16(_mm256_maddubs_epi16(positive, weights), _mm256_set1_epi16(1));
#endif
#else
    for (int o = 0; o < 8; o++)
        sum[o] += w[4 * o] * q[0] + w[4 * o + 1] * q[1] + w[4 * o + 2] * q[2] + w[4 * o + 3] * q[3];
    return sum;
#endif
}

/* As `micro`, for quantized inputs; k is a multiple of 4. */
INLINE void micro_w8a8(const int T, const int P, MICRO_W8A8_ARGUMENTS) {
    v8i acc[6][8];
    for (int t = 0; t < T; t++)
        for (int j = 0; j < 2 * P; j++) acc[t][j] = (v8i){0};
    for (int i = 0; i < k; i += 4) {
        if (T > 2) __builtin_prefetch(w + (long)(i + INPUT_BLOCK) * PANEL, 0, 2);
        for (int t = 0; t < T; t++)
            for (int j = 0; j < 2 * P; j++) acc[t][j] = dot4(acc[t][j], w + j / 2 * panel_stride + i * PANEL + j % 2 * 32, q + t * ldq + i);
    }
    for (int t = 0; t < T; t++)
        for (int j = 0; j < 2 * P; j++) {
            v8 scale = load(scales + j / 2 * scale_stride + j % 2 * 8) * splat(q_scales[t * ldscale]);
            add_to_outputs(y + t * ldy + 8 * j, __builtin_convertvector(acc[t][j], v8) * scale, n_outputs - 8 * j, accumulate);
        }
}

typedef void (*Micro)(MICRO_ARGUMENTS);
typedef void (*MicroW8A8)(MICRO_W8A8_ARGUMENTS);

#define DEFINE_MICRO(T, P)                                                                                                                                                          \
    static void micro_fp32_##T##_##P(MICRO_ARGUMENTS) { micro(FP32, T, P, k, panel_stride, w, scales, scale_stride, x, ldx, y, ldy, n_outputs, accumulate); }                                \
    static void micro_bf16_##T##_##P(MICRO_ARGUMENTS) { micro(BF16, T, P, k, panel_stride, w, scales, scale_stride, x, ldx, y, ldy, n_outputs, accumulate); }                                \
    static void micro_int8_##T##_##P(MICRO_ARGUMENTS) { micro(INT8, T, P, k, panel_stride, w, scales, scale_stride, x, ldx, y, ldy, n_outputs, accumulate); }                                \
    static void micro_w8a8_##T##_##P(MICRO_W8A8_ARGUMENTS) { micro_w8a8(T, P, k, panel_stride, w, scales, scale_stride, q, ldq, q_scales, ldscale, y, ldy, n_outputs, accumulate); }
DEFINE_MICRO(1, 1) DEFINE_MICRO(1, 4) DEFINE_MICRO(2, 1) DEFINE_MICRO(2, 2) DEFINE_MICRO(3, 1) DEFINE_MICRO(4, 1) DEFINE_MICRO(5, 1) DEFINE_MICRO(6, 1)

/* By the number of rows: [0] is one row and four panels, [1] two rows and two panels, [1 + n] n rows and one panel. */
#define TABLE(name) {name##_1_4, name##_2_2, name##_1_1, name##_2_1, name##_3_1, name##_4_1, name##_5_1, name##_6_1}
static const Micro micros[3][8] = {TABLE(micro_fp32), TABLE(micro_bf16), TABLE(micro_int8)};
static const MicroW8A8 micros_w8a8[8] = TABLE(micro_w8a8);

/* Quantizes n inputs to int8 values q, scale * q being within scale / 2 of x; returns the scale, the largest |x| / 127. It is NaN if an input is NaN
 * or infinite. q has room for n rounded up to a multiple of 4, filled with zeros. */
static float quantize_block(int n, const float *x, int8_t *q) {
    v8 top = splat(0), zeros = splat(0);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 v = load(x + i), size = (v8)((v8i)v & 0x7fffffff);
        top = blend(size > top, size, top);
        zeros += v * splat(0); /* NaN stays */
    }
    float largest = 0, zero = horizontal_sum(zeros);
    for (int j = 0; j < 8; j++) largest = top[j] > largest ? top[j] : largest;
    for (; i < n; i++) {
        float size = fabsf(x[i]);
        largest = size > largest ? size : largest, zero += x[i] * 0;
    }
    float to_int = largest > 0 ? 127 / largest : 0;
    if (!(to_int <= 1e38f)) to_int = 0; /* 127 / largest overflows, so the inputs are next to zero: take them as zero */
    for (i = 0; i + 8 <= n; i += 8) {
        v8i rounded = (v8i)(load(x + i) * splat(to_int) + splat(12582912.0f)) - (v8i)splat(12582912.0f); /* to the nearest, in the low bits */
        s8x8 bytes = __builtin_convertvector(rounded, s8x8);
        memcpy(q + i, &bytes, sizeof bytes);
    }
    for (; i < n; i++) q[i] = (int8_t)((v8i)splat(x[i] * to_int + 12582912.0f) - (v8i)splat(12582912.0f))[0];
    for (; i % 4; i++) q[i] = 0;
    return largest / 127 + zero;
}

/* The quantized rows of a thread's current product: W8A8 only. */
#define MAX_QUANTIZED (4 << 20)
#define MAX_ROWS 510 /* rows at a time, so that they stay in the cache: whole tiles of 6 */
static __thread struct {
    int8_t q[MAX_QUANTIZED];
    float scales[MAX_QUANTIZED / INPUT_BLOCK + MAX_ROWS];
} quantized;

static inline int input_blocks_of(const Matrix *w) { return (w->I + INPUT_BLOCK - 1) / INPUT_BLOCK; }
static inline long padded_inputs(const Matrix *w) { return w->format == W8A8 ? (w->I + 3L) & ~3L : w->I; }

static void quantize_rows(int n, const Matrix *w, const float *x, long ldx) {
    for (int t = 0; t < n; t++)
        for (int c = 0; c < input_blocks_of(w); c++) {
            int first = c * INPUT_BLOCK, k = w->I - first < INPUT_BLOCK ? w->I - first : INPUT_BLOCK;
            quantized.scales[t * input_blocks_of(w) + c] = quantize_block(k, x + t * ldx + first, quantized.q + t * padded_inputs(w) + first);
        }
}

/* Panels first .. last - 1 of a matrix for all n rows. For W8A8 the rows are in `quantized`. */
static void matmul_panels(int n, const Matrix *m, int first, int last, const float *x, long ldx, float *y, long ldy) {
    int tiles = (n + 5) / 6, p = first, format = m->format, n_blocks = input_blocks_of(m);
    long inputs = padded_inputs(m), panel_stride = inputs * PANEL;
    while (p < last) {
        int n_panels = n == 1 ? 4 : n == 2 ? 2 : 1; /* with few rows several panels at a time: enough independent sums to hide the latency of an FMA */
        if (p + n_panels > last || (p + n_panels) * PANEL > m->O) n_panels = 1;
        int n_outputs = m->O - p * PANEL < n_panels * PANEL ? m->O - p * PANEL : n_panels * PANEL;
        for (int c = 0; c < n_blocks; c++) {
            long i = (long)c * INPUT_BLOCK;
            int k = inputs - i < INPUT_BLOCK ? inputs - i : INPUT_BLOCK;
            const void *w = (const char *)m->panels + (p * panel_stride + i * PANEL) * format_bytes(format);
            const float *scales = m->scales ? m->scales + ((long)p * n_blocks + c) * PANEL : 0;
            for (int j = 0, t = 0; j < tiles; j++) {
                int rows = (n - t) / (tiles - j), kernel = n_panels == 4 ? 0 : n_panels == 2 ? 1 : 1 + rows;
                float *out = y + t * ldy + p * PANEL;
                if (format == W8A8)
                    micros_w8a8[kernel](k, panel_stride, w, scales, (long)n_blocks * PANEL, quantized.q + t * inputs + i, inputs, quantized.scales + t * n_blocks + c, n_blocks, out, ldy, n_outputs, c > 0);
                else
                    micros[format][kernel](k, panel_stride, w, scales, (long)n_blocks * PANEL, x + t * ldx + i, ldx, out, ldy, n_outputs, c > 0);
                t += rows;
            }
        }
        p += n_panels;
    }
}

/* As matmul_panels, for any number of rows and any format. *quantized_from is the first of the rows that are in `quantized`, -1: none; it
 * starts at -1 in every phase. */
static void matmul_range(int n, const Matrix *w, int first, int last, const float *x, long ldx, float *y, long ldy, int *quantized_from) {
    long fitting = w->format == W8A8 ? MAX_QUANTIZED / padded_inputs(w) : MAX_ROWS;
    int at_a_time = fitting < MAX_ROWS ? (int)fitting : MAX_ROWS;
    for (int t = 0; t < n; t += at_a_time) {
        int rows = n - t < at_a_time ? n - t : at_a_time;
        if (w->format == W8A8 && *quantized_from != t) quantize_rows(rows, w, x + t * ldx, ldx), *quantized_from = t;
        matmul_panels(rows, w, first, last, x + t * ldx, ldx, y + t * ldy, ldy);
    }
}

/* Panels that a thread claims at a time: as many as the micro kernels take at once, so that all threads have about the same work. */
static inline int panels_per_claim(const Thread *self, int n, int n_panels) {
    int most = n <= 2 ? 4 : 2, share = n_panels / self->n_threads;
    return share < most ? share : most;
}

/* y = x w^T in one phase. Returns what finish_phase returns: 0 in a helper thread that was scheduled after the call had ended. */
static int matmul(Thread *self, int n, const Matrix *w, const float *x, long ldx, float *y, long ldy) {
    int n_panels = (w->O + PANEL - 1) / PANEL;
    Phase phase = begin_phase(self, n_panels, panels_per_claim(self, n, n_panels));
    int quantized_from = -1;
    while (claim(self, &phase)) matmul_range(n, w, phase.first, phase.last, x, ldx, y, ldy, &quantized_from);
    return finish_phase(self, &phase);
}

/* Row o of a matrix (O, I) as fp32. */
static void matrix_row(const Matrix *m, long o, float *out) {
    long panel = o / PANEL, in_panel = o % PANEL, first = panel * padded_inputs(m) * PANEL;
    for (long i = 0; i < m->I; i++) {
        long at = m->format == W8A8 ? first + i / 4 * (4 * PANEL) + in_panel * 4 + i % 4 : first + i * PANEL + in_panel;
        uint32_t bits = m->format == BF16 ? (uint32_t)((const uint16_t *)m->panels)[at] << 16 : 0;
        if (m->format == FP32) out[i] = ((const float *)m->panels)[at];
        else if (m->format == BF16) memcpy(out + i, &bits, sizeof bits);
        else out[i] = ((const int8_t *)m->panels)[at] * m->scales[(panel * input_blocks_of(m) + i / INPUT_BLOCK) * PANEL + in_panel];
    }
}

typedef struct {
    int n;
    Matrix w;
    const float *x;
    float *y;
} Linear;

static void linear_task(const void *arguments, Thread *self) {
    const Linear *a = arguments;
    matmul(self, a->n, &a->w, a->x, a->w.I, a->y, a->w.O);
}

/* y = x w^T for n rows */
void linear(int threads, int n, const Matrix *w, const float *x, float *y) {
    Linear a = {n, *w, x, y};
    RUN_TASK(threads, linear_task, a);
}
