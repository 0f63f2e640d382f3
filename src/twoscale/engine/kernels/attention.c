/* Attention of rows over the caches of their sequences. */

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
    v8 tops = splat(top), sum = splat(0);
    int p = 0;
    for (; p + 8 <= end; p += 8) { v8 s = load(score + p); tops = blend(s > tops, s, tops); } /* a NaN is left out, as below */
    for (int j = 0; j < 8; j++) top = tops[j] > top ? tops[j] : top;
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
            const float *value = values + (long)p * D + i;
            v8 weight = splat(score[p]);
            for (int j = 0; j < 8; j++) acc[j] = fma8(weight, load(value + 8 * j), acc[j]);
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
            const float *value = values + (long)p * D + i;
            v8 w = splat(score_a[p]), v = splat(score_b[p]);
            for (int j = 0; j < 4; j++) {
                v8 x = load(value + 8 * j);
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
        long p = view->part[t], head = (long)(h / (H / a->J)) * view->capacity[p] * D, position = view->position[t];
        const float *query = a->q + t * a->q_row + (long)h * D, *keys = view->keys[p] + head, *values = view->values[p] + head;
        float *y = a->out + ((long)t * H + h) * D;
        if (t % 2 == 0 && t + 1 < a->n && view->part[t + 1] == p && view->position[t + 1] > position) {
            attend_two(D, (int)position + 1, (int)view->position[t + 1] + 1, query, query + a->q_row, keys, values, score, score + a->longest, y,
                       y + (long)H * D);
            return;
        }
        attend_one(D, (int)position + 1, query, keys, values, score, y);
    }
}

/* Two phases: all rows write their keys and values, then each row attends to its sequence up to its own position. Returns 0
 * in a helper thread that came too late, as finish_phase does. */
static int attention(Thread *self, const Attention *a) {
    Phase phase = begin_phase(self, a->n, items_per_claim(self, a->n));
    while (claim(self, &phase))
        for (int t = phase.first; t < phase.last; t++)
            for (int j = 0; j < a->J; j++) {
                long part = a->view->part[t], offset = (j * a->view->capacity[part] + a->view->position[t]) * a->D;
                memcpy(a->view->keys[part] + offset, a->k + t * a->k_row + (long)j * a->D, a->D * sizeof(float));
                memcpy(a->view->values[part] + offset, a->v + t * a->v_row + (long)j * a->D, a->D * sizeof(float));
            }
    if (!finish_phase(self, &phase)) return 0;
    float *score = a->scores + 2 * self->index * a->longest;
    phase = begin_phase(self, (a->n + 1) / 2 * a->H, items_per_claim(self, (a->n + 1) / 2 * a->H));
    while (claim(self, &phase))
        for (int u = phase.first; u < phase.last; u++) attend_pair(a, u / a->H * 2, u % a->H, score);
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
void fill_deeper_levels(int J, int D, long capacity, long position, long level, long from, long to, float *keys, float *values) {
    long level_size = J * capacity * D;
    for (int j = 0; j < J; j++) {
        long offset = (j * capacity + position) * D;
        for (long l = from; l < to; l++) {
            memcpy(keys + l * level_size + offset, keys + level * level_size + offset, D * sizeof(float));
            memcpy(values + l * level_size + offset, values + level * level_size + offset, D * sizeof(float));
        }
    }
}
