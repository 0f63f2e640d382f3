/* The statistics that exit rules compare with a threshold, for one row after a step. `Statistic.code` in exits/statistics.py must match this
 * enum; the rules in exits/ are the definitions. Decisions are made in double precision: they must not depend on the batch. */

enum {
    /* X_OVER_Y is the ratio X / Y; NEGATED_STEP is minus the loop step, so that "k steps are taken" is "statistic below tau" too */
    STEP_NORM, STEP_NORM_OVER_STATE, ACCELERATION, ACCELERATION_OVER_STEP_NORMS, ACCELERATION_OVER_STATE, COSINE_DISTANCE, NEGATED_STEP,
    LEARNED_FROM_NORMS, LEARNED_FROM_STATE, KL_FORWARD, KL_REVERSE, KL_MIN_P, ENTROPY_CHANGE, ARGMAX_CHANGE, CONFIDENCE
};

/* The condition of an exit rule: a step passes if its statistic is below tau, or above it (`above`). A row exits when `hits` consecutive
 * steps have passed, and not before step `min_steps`. In Python: exits/statistics.py, `ConditionStruct` in library.py. */
typedef struct {
    double tau;
    const double *parameters; /* the weights of a learned exit rule (exits.Learned), or min_p */
    float *remembered;        /* (rows of this rule, remembered_size): `RuleState.remembered`, NaN before a row's first step */
    int64_t remembered_size;
    int64_t hits;             /* consecutive steps that must pass */
    int64_t min_steps;
    int32_t statistic, above, return_previous; /* return_previous: a row that exits returns the state before its newest step */
} Condition;

/* One row after a step. */
typedef struct {
    int C, V;
    int64_t loop_step;
    const float *before, *after; /* (C,) */
    const float *norms;          /* (5,) of `update_norms` */
    float *logits;               /* (V,), overwritten; null unless the statistic reads them */
} RowStep;

#define EPS 1e-20
static double ratio(double norm, double others) { return norm / (others + EPS); }

static double norm_statistic(int statistic, const float *norms) {
    /* norms of: the update, its difference from the previous update, the previous update, the states before and after */
    double update = norms[0], acceleration = norms[1], previous = norms[2], before = norms[3], after = norms[4];
    switch (statistic) {
    case STEP_NORM: return update;
    case STEP_NORM_OVER_STATE: return ratio(update, before);
    case ACCELERATION: return acceleration;
    case ACCELERATION_OVER_STEP_NORMS: return ratio(acceleration, update + previous);
    case ACCELERATION_OVER_STATE: return ratio(acceleration, before);
    case COSINE_DISTANCE: return (update * update - (before - after) * (before - after) + EPS) / (2 * before * after + EPS);
    }
    return NAN;
}

static double sigmoid(double score) { return score != score ? score : 1 / (1 + exp(-fmax(-80.0, fmin(80.0, score)))); }

/* A linear head on the norms of updates, as `features` in exits/learned.py. */
static double learned_from_norms(const double *w, const float *norms, int64_t loop_step) {
    double update = norms[0], acceleration = norms[1], previous = norms[2], state = norms[3], log_step = log((double)loop_step);
    double relative = log(ratio(update, state) + 1e-9);
    double cosine = (update * update + previous * previous - acceleration * acceleration) / (2 * update * previous + EPS);
    double f[7] = {1.0, relative, log(ratio(acceleration, state) + 1e-9), log(ratio(update, previous) + 1e-9), cosine, log_step, relative * log_step};
    double score = 0;
    for (int i = 0; i < 7; i++) score += w[i] * f[i];
    return sigmoid(score);
}

/* w2 . gelu(W1 f) + b with f = [1, log k, after, after - before]; W1 is (HIDDEN, 2 + 2 C). */
#define HIDDEN 8
static double learned_from_state(const double *w, int C, const float *before, const float *after, int64_t loop_step) {
    const double *second = w + HIDDEN * (2L + 2 * C);
    double score = second[HIDDEN], log_step = log((double)loop_step);
    for (int h = 0; h < HIDDEN; h++, w += 2 + 2 * C) {
        double sums[4] = {w[0] + w[1] * log_step, 0, 0, 0}; /* independent sums, which hide the latency of an addition */
        for (int i = 0; i < C; i++) {
            double x = after[i], update = x - before[i];
            sums[i % 2] += w[2 + i] * x, sums[2 + i % 2] += w[2 + C + i] * update;
        }
        double u = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        score += second[h] * (0.5 * u * (1 + erf(u * 0.70710678118654752440)));
    }
    return sigmoid(score);
}

/* Sums over the vocabulary: SUM_BLOCK terms at a time in eight fp32 lanes, these sums in double precision. */
#define SUM_BLOCK 256 /* entries of the vocabulary */
#define SUM_OVER_VOCABULARY(total, V, vector_term, scalar_term)                                               \
    do {                                                                                                      \
        int i = 0;                                                                                            \
        while (i + 8 <= V) {                                                                                  \
            v8 lanes = splat(0);                                                                              \
            int end = i + SUM_BLOCK < V ? i + SUM_BLOCK : V;                                                  \
            for (; i + 8 <= end; i += 8) lanes += (vector_term);                                              \
            total += horizontal_sum(lanes);                                                                   \
        }                                                                                                     \
        for (; i < V; i++) total += (scalar_term);                                                            \
    } while (0)

static float largest(int V, const float *x) {
    float top = -INFINITY;
    for (int i = 0; i < V; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static inline float exp_of(float x) { return vexp(splat(x))[0]; }

static void log_softmax(int V, float *x) {
    double mass = 0;
    float top = largest(V, x);
    SUM_OVER_VOCABULARY(mass, V, vexp(load(x + i) - splat(top)), exp_of(x[i] - top));
    float shift = (float)log(mass);
    for (int i = 0; i < V; i++) x[i] = x[i] - top - shift;
}

/* KL(p || q) of log-probabilities. */
static double divergence(int V, const float *p, const float *q) {
    double sum = 0;
    SUM_OVER_VOCABULARY(sum, V, vexp(load(p + i)) * (load(p + i) - load(q + i)), exp_of(p[i]) * (p[i] - q[i]));
    return sum;
}

/* Min-p filter on log-probabilities, in place: probabilities below min_p times the largest become 1 / V, then all are normalised again. */
static void filter_min_p(int V, double min_p, float *x) {
    double mass = 0;
    float limit = (float)(min_p * exp_of(largest(V, x)));
    for (int i = 0; i < V; i++) {
        float p = exp_of(x[i]);
        x[i] = p < limit ? 1.0f / V : p;
        mass += x[i];
    }
    for (int i = 0; i < V; i++) x[i] = (float)log(x[i] / mass);
}

/* A statistic of the logits; `remembered` is of the previous step, and is overwritten for the next one. */
static double logit_statistic(const Condition *condition, int V, float *x, float *remembered) {
    double value = 0, previous;
    log_softmax(V, x);
    switch (condition->statistic) {
    case KL_FORWARD: value = divergence(V, x, remembered); break;
    case KL_REVERSE: value = divergence(V, remembered, x); break;
    case KL_MIN_P: filter_min_p(V, condition->parameters[0], x), value = divergence(V, remembered, x); break;
    case ENTROPY_CHANGE:
        SUM_OVER_VOCABULARY(value, V, vexp(load(x + i)) * load(x + i), exp_of(x[i]) * x[i]);
        previous = remembered[0], remembered[0] = (float)-value;
        return fabs(remembered[0] - previous);
    default: {
        int first = 0, second = V > 1;
        for (int i = 1; i < V; i++)
            if (x[i] > x[first]) second = first, first = i;
            else if (i == 1 || x[i] > x[second]) second = i;
        if (condition->statistic == CONFIDENCE) return exp_of(x[first]) - exp_of(x[second]);
        previous = remembered[0], remembered[0] = (float)first; /* exact: vocabularies are below 2^24 */
        return fabs(first - previous);
    }
    }
    memcpy(remembered, x, V * sizeof(float));
    return value;
}

static int reads_logits(int statistic) { return statistic >= KL_FORWARD; }

/* The statistic of one row; `row` is its index among the rows of its rule. */
static double statistic_of(const Condition *condition, const RowStep *s, long row) {
    if (condition->statistic == NEGATED_STEP) return -(double)s->loop_step;
    if (condition->statistic == LEARNED_FROM_NORMS) return learned_from_norms(condition->parameters, s->norms, s->loop_step);
    if (condition->statistic == LEARNED_FROM_STATE) return learned_from_state(condition->parameters, s->C, s->before, s->after, s->loop_step);
    if (reads_logits(condition->statistic))
        return logit_statistic(condition, s->V, s->logits,
                               condition->remembered ? condition->remembered + row * condition->remembered_size : 0);
    return norm_statistic(condition->statistic, s->norms);
}

/* The statistic of one rule for n rows, for steps that were not taken by `iterate`: before, after (n, C), norms (n, 5), loop_step (n,),
 * logits (n, V), values (n,). What the statistic does not need may be null. */
void statistics(int n, int C, int V, const Condition *condition, const float *before, const float *after, const float *norms,
                const int64_t *loop_step, float *logits, double *values) {
    for (int t = 0; t < n; t++) {
        RowStep s = {.C = C, .V = V, .loop_step = loop_step[t], .before = before + (long)t * C, .after = after + (long)t * C,
                     .norms = norms ? norms + (long)NORMS * t : 0, .logits = logits ? logits + (long)t * V : 0};
        values[t] = statistic_of(condition, &s, t);
    }
}
