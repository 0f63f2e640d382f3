/* Attention of rows over the caches of their sequences. Keys and values are FP32 or BF16 (`format`, a constant in each copy of the inlined
 * functions); BF16 becomes fp32 when it is loaded, which is exact. */

/* Number i of keys or values, as fp32. */
INLINE float kv_at(int format, const void *kv, long i) {
    if (format != BF16) return ((const float *)kv)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)kv)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE const void *kv_from(int format, const void *kv, long i) { return (const char *)kv + i * format_bytes(format); }

/* Store n numbers from index i on; BF16 is rounded to the nearest number, ties to even, as in torch. */
static void store_kv(int format, void *kv, long i, const float *x, int n) {
    if (format != BF16) {
        memcpy((float *)kv + i, x, n * sizeof(float));
        return;
    }
    for (int j = 0; j < n; j++) {
        uint32_t bits;
        memcpy(&bits, x + j, sizeof bits);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        ((uint16_t *)kv)[i + j] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded; /* a NaN stays one */
    }
}

/* Dot product over the last D % 8 channels of a query and the key from index i on. */
INLINE float dot_tail(int format, int D, const float *query, const void *keys, long i) {
    float s = 0;
    for (int j = D - D % 8; j < D; j++) s += query[j] * kv_at(format, keys, i + j);
    return s;
}

/* Scores of one query against n <= 4 keys (n, D). Four independent accumulators hide the latency of an FMA. */
INLINE void dots(int format, int n, int D, const float *query, const void *keys, float scale, float *score) {
    v8 acc[4] = {splat(0), splat(0), splat(0), splat(0)};
    float sums[4];
    for (int i = 0; i + 8 <= D; i += 8) {
        v8 q = load(query + i);
        for (int k = 0; k < n; k++) acc[k] = fma8(q, load_as_fp32(format, keys, k * D + i), acc[k]);
    }
    horizontal_sums(acc, scale, sums);
    for (int k = 0; k < n; k++) score[k] = D % 8 ? sums[k] + scale * dot_tail(format, D, query, keys, k * D) : sums[k];
}

/* Scores of one query against keys (end, D). */
INLINE void dots_of_keys(int format, int D, int end, const float *query, const void *keys, float scale, float *score) {
    int p = 0;
    for (; p + 4 <= end; p += 4) dots(format, 4, D, query, kv_from(format, keys, (long)p * D), scale, score + p);
    for (; p < end; p++) dots(format, 1, D, query, kv_from(format, keys, (long)p * D), scale, score + p);
}

/* score[p] becomes e^(score[p] - max); returns 1 / their sum, by which the caller multiplies. There is room for whole vectors of scores. */
static float softmax(int end, float *score) {
    int whole = end - end % 8;
    const v8i lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    v8 tops = splat(-INFINITY), sum = splat(0);
    for (int p = 0; p < whole; p += 8) tops = max8(load(score + p), tops); /* a NaN is left out */
    if (whole < end) tops = max8(blend(lanes < end - whole, load(score + whole), splat(-INFINITY)), tops);
    float top = horizontal_max(tops);
    for (int p = 0; p < whole; p += 8) { v8 e = vexp(load(score + p) - splat(top)); store(score + p, e); sum += e; }
    float mass = horizontal_sum(sum);
    if (whole < end) store(score + whole, vexp(load(score + whole) - splat(top)));
    for (int p = whole; p < end; p++) mass += score[p];
    return 1.0f / mass;
}

/* `weighted_sum` for the channels from i on. */
INLINE void weighted_tail(int format, int D, int i, int end, const float *score, const void *values, float normalizer, float *y) {
    for (; i < D; i++) {
        float acc = 0;
        for (int p = 0; p < end; p++) acc += score[p] * kv_at(format, values, (long)p * D + i);
        y[i] = acc * normalizer;
    }
}

/* y = normalizer * (sum over p in 0 .. end - 1 of score[p] values[p]). */
INLINE void weighted_sum(int format, int D, int end, const float *score, const void *values, float normalizer, float *y) {
    int i = 0, p;
    for (; i + 64 <= D; i += 64) {
        v8 acc[8];
        for (int j = 0; j < 8; j++) acc[j] = splat(0);
        for (p = 0; p < end; p++) {
            v8 weight = splat(score[p]);
            for (int j = 0; j < 8; j++) acc[j] = fma8(weight, load_as_fp32(format, values, (long)p * D + i + 8 * j), acc[j]);
        }
        for (int j = 0; j < 8; j++) store(y + i + 8 * j, acc[j] * splat(normalizer));
    }
    for (; i + 32 <= D; i += 32) { /* the same order as in attend_several, to the bit */
        v8 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = splat(0);
        for (p = 0; p < end; p++)
            for (int j = 0; j < 4; j++) acc[j] = fma8(splat(score[p]), load_as_fp32(format, values, (long)p * D + i + 8 * j), acc[j]);
        for (int j = 0; j < 4; j++) store(y + i + 8 * j, acc[j] * splat(normalizer));
    }
    weighted_tail(format, D, i, end, score, values, normalizer, y);
}

/* One query against keys and values (end, D). */
INLINE void attend_one(int format, int D, int end, const float *query, const void *keys, const void *values, float *score, float *y) {
    dots_of_keys(format, D, end, query, keys, 1.0f / sqrtf((float)D), score);
    float normalizer = softmax(end, score);
    weighted_sum(format, D, end, score, values, normalizer, y);
}

/* Keys (n, D), n <= 8, transposed for `scores_of_keys`: t[i] holds channel i of eight keys, zeros where there are fewer. */
INLINE void transpose_keys(int format, int n, int D, const void *keys, v8 *t) {
    int i = 0;
#ifdef __AVX__
    for (; i + 8 <= D; i += 8) {
        __m256 r[8], s[8];
        for (int k = 0; k < 8; k++) r[k] = k < n ? (__m256)load_as_fp32(format, keys, (long)k * D + i) : _mm256_setzero_ps();
        for (int k = 0; k < 8; k += 2) s[k] = _mm256_unpacklo_ps(r[k], r[k + 1]), s[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
        for (int k = 0; k < 8; k += 4)
            for (int j = 0; j < 2; j++) {
                r[k + 2 * j] = _mm256_shuffle_ps(s[k + j], s[k + 2 + j], 0x44);
                r[k + 2 * j + 1] = _mm256_shuffle_ps(s[k + j], s[k + 2 + j], 0xee);
            }
        for (int k = 0; k < 4; k++) {
            t[i + k] = (v8)_mm256_permute2f128_ps(r[k], r[k + 4], 0x20);
            t[i + k + 4] = (v8)_mm256_permute2f128_ps(r[k], r[k + 4], 0x31);
        }
    }
#endif
    for (; i < D; i++) {
        float channel[8] = {0};
        for (int k = 0; k < n; k++) channel[k] = kv_at(format, keys, (long)k * D + i);
        t[i] = load(channel);
    }
}

/* Scores of T queries at distances of q_row against eight keys, which are transposed. The sums have the order of `dots`: acc[j] is what
 * that has in element j, for each of the keys. */
INLINE void scores_of_keys(const int T, int D, const float *q, long q_row, const v8 *keys, float scale, float *score, long stride) {
    v8 acc[2][8];
    for (int t = 0; t < T; t++)
        for (int j = 0; j < 8; j++) acc[t][j] = splat(0);
    int i = 0;
    for (; i + 8 <= D; i += 8)
        for (int j = 0; j < 8; j++) {
            v8 key = keys[i + j];
            KEEP_IN_REGISTER(key);
            for (int t = 0; t < T; t++) acc[t][j] = fma8(splat(q[t * q_row + i + j]), key, acc[t][j]);
        }
    for (int t = 0; t < T; t++) {
        v8 *a = acc[t], tail = splat(0), sums = (((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))) * splat(scale);
        for (int j = i; j < D; j++) tail += splat(q[t * q_row + j]) * keys[j];
        store(score + t * stride, D % 8 ? sums + splat(scale) * tail : sums);
    }
}

/* 16 channels of T queries: y[t] = normalizer[t] * (sum over p in 0 .. end[t] - 1 of score[t][p] values[p]), end ascending. */
INLINE void weighted_sums(int format, const int T, int D, const int *end, const float *score, long stride, const void *values, const float *normalizer, float *y, long y_row) {
    v8 acc[4][2];
    int p = 0;
    for (int t = 0; t < T; t++) acc[t][0] = acc[t][1] = splat(0);
    for (; p < end[0]; p++) {
        v8 low = load_as_fp32(format, values, (long)p * D), high = load_as_fp32(format, values, (long)p * D + 8);
        KEEP_IN_REGISTER(low);
        KEEP_IN_REGISTER(high);
        for (int t = 0; t < T; t++) {
            v8 weight = splat(score[t * stride + p]);
            acc[t][0] = fma8(weight, low, acc[t][0]), acc[t][1] = fma8(weight, high, acc[t][1]);
        }
    }
    for (int t = 0; t < T; t++) {
        for (int i = p; i < end[t]; i++)
            for (int j = 0; j < 2; j++) acc[t][j] = fma8(splat(score[t * stride + i]), load_as_fp32(format, values, (long)i * D + 8 * j), acc[t][j]);
        for (int j = 0; j < 2; j++) store(y + t * y_row + 8 * j, acc[t][j] * splat(normalizer[t]));
    }
}

/* Several queries of one sequence at ascending positions: query t, at a distance of q_row from the one before, attends to the first end[t]
 * keys and values. Those are loaded once for all of them, and every sum has the same order as in attend_one. score is (n, stride); stride is at
 * least the largest end, rounded up to a multiple of 8. */
#define ATTEND_ROWS 8
INLINE void attend_several(int format, int n, int D, const int *end, const float *q, long q_row, const void *keys, const void *values, float *score,
                           long stride, float *y, long y_row) {
    float scale = 1.0f / sqrtf((float)D), normalizer[ATTEND_ROWS];
    v8 transposed[D];
    for (int t = 0; n < 4 && t < n; t++) dots_of_keys(format, D, end[t], q + t * q_row, keys, scale, score + t * stride); /* too few for a transposition */
    for (int p = 0; n >= 4 && p < end[n - 1]; p += 8) {
        transpose_keys(format, end[n - 1] - p < 8 ? end[n - 1] - p : 8, D, kv_from(format, keys, (long)p * D), transposed);
        int t = 0;
        for (; t + 2 <= n; t += 2) scores_of_keys(2, D, q + t * q_row, q_row, transposed, scale, score + t * stride + p, stride);
        if (t < n) scores_of_keys(1, D, q + t * q_row, q_row, transposed, scale, score + t * stride + p, stride);
    }
    for (int t = 0; t < n; t++) normalizer[t] = softmax(end[t], score + t * stride);
    for (int t = 0, rows; t < n; t += rows) {
        rows = n - t < 4 ? n - t : 4;
        for (int i = 0; i < D - D % 32; i += 16) {
#define WEIGHTED_SUMS(T) \
    weighted_sums(format, T, D, end + t, score + t * stride, stride, kv_from(format, values, i), normalizer + t, y + t * y_row + i, y_row)
            if (rows == 4) WEIGHTED_SUMS(4);
            else if (rows == 3) WEIGHTED_SUMS(3);
            else if (rows == 2) WEIGHTED_SUMS(2);
            else WEIGHTED_SUMS(1);
        }
        for (int r = t; r < t + rows; r++) weighted_tail(format, D, D - D % 32, end[r], score + r * stride, values, normalizer[r], y + r * y_row);
    }
}

/* Where n rows of several sequences write their keys and values, and what they attend to. Row t belongs to part p = part[t] (see rows.py) and is
 * at position[t] of its sequence, whose keys[p] and values[p] point at (J, capacity[p], D) in format[p]. All positions are below `longest`. */
typedef struct {
    const int64_t *part, *capacity, *position;
    void **keys, **values;
    const int32_t *format;
    int64_t longest;
} KVView;

/* Arguments of attention: queries, keys and values with row strides; out is (n, H, D). */
typedef struct {
    int n, H, J, D;
    const float *q, *k, *v;
    long q_row, k_row, v_row, longest;
    const KVView *view;
    float *scores; /* ATTEND_ROWS * threads * score_stride(longest) floats */
    float *out;
} Attention;

/* Floats from the scores of one row to those of the next: room for whole vectors. */
static inline long score_stride(long longest) { return (longest + 7) & ~7L; }

/* Rows t .. last - 1 for one head, at most ATTEND_ROWS: those of one sequence, at the same level of its cache, in one pass over its keys. */
static void attend_rows(const Attention *a, int t, int last, int h, float *score) {
    const KVView *view = a->view;
    int H = a->H, D = a->D, end[ATTEND_ROWS];
    for (int n; t < last; t += n) {
        long p = view->part[t], head = (long)(h / (H / a->J)) * view->capacity[p] * D;
        int format = view->format[p];
        const float *query = a->q + t * a->q_row + (long)h * D;
        const void *keys = kv_from(format, view->keys[p], head), *values = kv_from(format, view->values[p], head);
        float *y = a->out + ((long)t * H + h) * D;
        for (n = 0; t + n < last && view->keys[view->part[t + n]] == view->keys[p] && (!n || view->position[t + n] + 1 > end[n - 1]); n++) end[n] = (int)view->position[t + n] + 1;
#define ATTEND(FORMAT) \
    if (n == 1) attend_one(FORMAT, D, end[0], query, keys, values, score, y); \
    else attend_several(FORMAT, n, D, end, query, a->q_row, keys, values, score, score_stride(a->longest), y, (long)H * D)
        if (format == BF16) { ATTEND(BF16); }
        else { ATTEND(FP32); }
    }
}

/* Row t writes its keys and values of heads first .. last - 1 to the cache. */
static void write_keys_and_values(const Attention *a, int t, int first, int last) {
    long part = a->view->part[t];
    for (int j = first; j < last; j++) {
        long offset = (j * a->view->capacity[part] + a->view->position[t]) * a->D;
        store_kv(a->view->format[part], a->view->keys[part], offset, a->k + t * a->k_row + (long)j * a->D, a->D);
        store_kv(a->view->format[part], a->view->values[part], offset, a->v + t * a->v_row + (long)j * a->D, a->D);
    }
}

/* The memory for the scores of one thread. */
static inline float *scores_of_thread(const Attention *a, const Thread *self) { return a->scores + ATTEND_ROWS * self->index * score_stride(a->longest); }

/* Two phases: all rows write their keys and values, then each row attends to its sequence up to its own position. Returns 0
 * in a helper thread that was scheduled after the call had ended, as finish_phase does. */
static int attention(Thread *self, const Attention *a) {
    Phase phase = begin_phase(self, a->n, items_per_claim(self, a->n));
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++) write_keys_and_values(a, t, 0, a->J);
    if (!finish_phase(self, &phase)) return 0;
    int rows = ATTEND_ROWS, tiles; /* an item is a head of `rows` rows: fewer where some threads would have none */
    while (tiles = (a->n + rows - 1) / rows, rows > 1 && tiles * a->H < 2 * self->n_threads) rows /= 2;
    phase = begin_phase(self, tiles * a->H, items_per_claim(self, tiles * a->H));
    while (claim(self, &phase))
        for (int u = phase.first; u < phase.last; u++) {
            int t = u / a->H * rows;
            attend_rows(a, t, t + rows < a->n ? t + rows : a->n, u % a->H, scores_of_thread(a, self));
        }
    return finish_phase(self, &phase);
}

static void attend_task(const void *arguments, Thread *self) { attention(self, arguments); }

/* Attention without the rest of a block. */
void attend(int threads, int n, int H, int J, int D, const float *q, const float *k, const float *v, long q_row, long k_row, long v_row,
            const KVView *view, float *scores, float *out) {
    Attention a = {n, H, J, D, q, k, v, q_row, k_row, v_row, view->longest, view, scores, out};
    RUN_TASK(threads, attend_task, a);
}

/* Kernels.fill_deeper_levels for one token: copies its key and value at `level` of the cache (L, J, capacity, D) to the levels
 * from .. to - 1. */
void fill_deeper_levels(int J, int D, int format, long capacity, long position, long level, long from, long to, void *keys, void *values) {
    long row_bytes = (long)D * format_bytes(format), level_bytes = J * capacity * row_bytes;
    for (int j = 0; j < J; j++) {
        long offset = (j * capacity + position) * row_bytes;
        for (long l = from; l < to; l++) {
            memcpy((char *)keys + l * level_bytes + offset, (char *)keys + level * level_bytes + offset, row_bytes);
            memcpy((char *)values + l * level_bytes + offset, (char *)values + level * level_bytes + offset, row_bytes);
        }
    }
}
