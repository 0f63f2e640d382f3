/* The layers of a stage in one C call: once (a plain stage), or several loop steps of a group with the conditions of its exit rules.
 *
 * `Loop.step` in loop.py is the definition of a step. Here it is the same kernels in the same order, so states, steps and caches are
 * bit-equal to it. The structs below have the same fields in the same order in library.py.
 */

/* Where the keys and values of one layer of one sequence are, (levels, J, capacity, D) each. Loop step k uses level (k - 1) mod max_levels. */
typedef struct {
    float *keys, *values;
    int64_t level_size, max_levels; /* level_size in floats */
} KVPointers;

/* The weights of a stage. For a loop group also: state_weight, the half of the input projection that multiplies the state (null: none), and
 * the gain of the norm after each step (null: none). */
typedef struct {
    int32_t C, n_layers;
    const Block *const *blocks;
    const Matrix *state_weight;
    const float *norm_gain;
    float norm_eps;
} StageWeights;

/* n rows of n_parts sequences or parts of them (see rows.py); as in KVView. */
typedef struct {
    int32_t n, n_parts;
    const int64_t *part, *capacity, *position;
    int64_t longest;
} RowSet;

/* All layers on x (n, C); out may be x. `kv` holds (n_layers, n_parts) pointers; `loop_step` (n_parts,) the loop steps, null for level 0. */
static void apply_layers(int threads, const StageWeights *s, const RowSet *r, const KVPointers *const *kv, const int64_t *loop_step,
                         const float *x, const float *cos, const float *sin, float *scratch, float *out) {
    float *keys[r->n_parts], *values[r->n_parts];
    KVView view = {r->part, r->capacity, r->position, keys, values, r->longest};
    for (int layer = 0; layer < s->n_layers; layer++, x = out) {
        for (int p = 0; p < r->n_parts; p++) {
            const KVPointers *pointers = kv[layer * r->n_parts + p];
            int64_t offset = loop_step ? (loop_step[p] - 1) % pointers->max_levels * pointers->level_size : 0;
            keys[p] = pointers->keys + offset, values[p] = pointers->values + offset;
        }
        block(threads, r->n, s->blocks[layer], x, cos, sin, &view, scratch, out);
    }
}

/* A plain stage. */
void run_stage(int threads, const StageWeights *s, const RowSet *r, const KVPointers *const *kv, const float *x, const float *cos,
               const float *sin, float *scratch, float *out) {
    apply_layers(threads, s, r, kv, 0, x, cos, sin, scratch, out);
}

/* The final norm (gain null: none) and the head, by which exit rules read logits (n, V); the head has O >= V outputs. */
typedef struct {
    int32_t V;
    const float *gain;
    const Matrix *head;
    float eps;
} Lens;

/* Rows inside a loop group. */
typedef struct {
    const float *x;               /* (n, C): states; never written */
    float *buffer_a, *buffer_b;   /* (n, C): the states after the 1st, 3rd, ... and after the 2nd, 4th, ... step of a call */
    const float *injected;        /* (n, C): what the input adds to every step; null: nothing */
    const float *cos, *sin;
    float *previous_step;         /* (n, C): the previous step of each row, NaN before the first; null: no statistic needs it */
    float *norms;                 /* (n, 5), if `previous_step` is given */
    const KVPointers *const *kv;  /* (n_layers, n_parts) */
    int64_t *loop_step;           /* (n_parts,): loop steps taken */
    const int64_t *max_steps;     /* (n_parts,): the loop step after which rows exit in any case */
    const ExitTest *tests;
    const int32_t *test_index;    /* (n,): index of each row's test, -1: none; null: all have the first */
    const int32_t *index_in_test; /* (n,): index of each row among the rows of its test; null: the row itself */
    const Lens *lens;             /* null: no test reads logits */
    float *lens_scratch;          /* min(n, LENS_ROWS) * (C + O) floats */
    double *values;               /* (n,): the statistics of the newest step */
    int64_t *streak;              /* (n,): number of consecutive steps that have passed; null: no test counts them */
    uint8_t *fired, *exits;       /* (n,): rows whose test fires after the newest step; rows that exit, also at max_steps */
    float *scratch;
} LoopRows;

#define LENS_ROWS 32 /* rows whose logits are computed at a time */

static inline const ExitTest *test_of(const LoopRows *l, int t) {
    return !l->tests ? 0 : !l->test_index ? l->tests : l->test_index[t] < 0 ? 0 : l->tests + l->test_index[t];
}

/* The statistic of row t; its logits are given if it reads them. */
static double value_of(const StageWeights *s, const RowSet *r, const LoopRows *l, const float *before, const float *after, int t, float *logits) {
    RowStep step = {.C = s->C, .V = l->lens ? l->lens->V : 0, .loop_step = l->loop_step[r->part[t]], .before = before + (long)t * s->C,
                    .after = after + (long)t * s->C, .norms = l->norms ? l->norms + (long)NORMS * t : 0, .logits = logits};
    return statistic_of(test_of(l, t), &step, l->index_in_test ? l->index_in_test[t] : t);
}

/* The statistics of all rows that read logits. */
static void read_lens(int threads, const StageWeights *s, const RowSet *r, const LoopRows *l, const float *before, const float *after) {
    const Lens *lens = l->lens;
    int C = s->C, rows[LENS_ROWS], n = 0;
    float *states = l->lens_scratch, *logits = states + (long)(r->n < LENS_ROWS ? r->n : LENS_ROWS) * C;
    for (int t = 0; t < r->n; t++) {
        const ExitTest *test = test_of(l, t);
        if (test && reads_logits(test->statistic)) {
            if (lens->gain) rms_norm_row(C, after + (long)t * C, lens->gain, lens->eps, states + (long)n * C);
            else memcpy(states + (long)n * C, after + (long)t * C, C * sizeof(float));
            rows[n++] = t;
        }
        if (n == LENS_ROWS || (n && t + 1 == r->n)) {
            linear(threads, n, lens->head, states, logits);
            for (int i = 0; i < n; i++) l->values[rows[i]] = value_of(s, r, l, before, after, rows[i], logits + (long)i * lens->head->O);
            n = 0;
        }
    }
}

/* Which rows exit after a step; returns whether any does. */
static int check_exits(int threads, const StageWeights *s, const RowSet *r, const LoopRows *l, const float *before, const float *after) {
    int any = 0;
    if (l->lens) read_lens(threads, s, r, l, before, after);
    for (int t = 0; t < r->n; t++) {
        int64_t loop_step = l->loop_step[r->part[t]];
        const ExitTest *test = test_of(l, t);
        l->fired[t] = 0;
        if (test) {
            if (!reads_logits(test->statistic)) l->values[t] = value_of(s, r, l, before, after, t, 0);
            int passed = test->above ? l->values[t] > test->tau : l->values[t] < test->tau;
            if (test->hits > 1) passed = (l->streak[t] = (l->streak[t] + 1) * passed) >= test->hits;
            l->fired[t] = passed && loop_step >= test->min_steps;
        }
        l->exits[t] = l->fired[t] || loop_step >= l->max_steps[r->part[t]];
        any |= l->exits[t];
    }
    return any;
}

/* Loop steps until a row exits, `max_steps` are taken, or *interrupt is not 0; returns the number of steps. Precondition: cache levels for
 * `max_steps` more steps are allocated. */
int iterate(int threads, const StageWeights *s, const RowSet *r, const LoopRows *l, int max_steps, const int32_t *interrupt) {
    int n = r->n, C = s->C, steps = 0, any = 0;
    long size = (long)n * C;
    const float *before = l->x;
    while (steps < max_steps && !any) {
        float *after = steps % 2 ? l->buffer_b : l->buffer_a;
        const float *input = before;
        for (int p = 0; p < r->n_parts; p++) l->loop_step[p]++;
        if (s->state_weight) linear(threads, n, s->state_weight, before, after), input = after;
        if (l->injected) {
            for (long i = 0; i < size; i++) after[i] = input[i] + l->injected[i];
            input = after;
        }
        apply_layers(threads, s, r, l->kv, l->loop_step, input, l->cos, l->sin, l->scratch, after);
        if (s->norm_gain) rms_norm(size < MIN_PARALLEL_SIZE ? 1 : threads, n, C, after, s->norm_gain, s->norm_eps, after);
        if (l->previous_step) step_norms(size < MIN_PARALLEL_SIZE ? 1 : threads, n, C, before, after, l->previous_step, l->norms);
        any = check_exits(threads, s, r, l, before, after);
        before = after, steps++;
        if (__atomic_load_n(interrupt, __ATOMIC_RELAXED)) break;
    }
    return steps;
}
