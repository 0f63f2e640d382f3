/* Matrix products: weights in panels, micro kernels for few rows. */

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
