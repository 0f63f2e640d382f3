/* The layers of a stage in one C call: once (a plain stage), or several loop steps of a group with the conditions of its exit rules.
 *
 * `LoopRows.step` in loop.py is the definition of a step. Here it is the same kernels in the same order, so states, steps and caches are
 * bit-equal to it. The structs below have the same fields in the same order in library.py.
 */

/* Where the keys and values of one layer of one sequence are, (levels, J, capacity, D) each. Loop step k uses level (k - 1) mod max_levels. */
typedef struct {
    void *keys, *values;
    int64_t level_size, max_levels, n_levels; /* level_size: numbers in a level; n_levels: how many are allocated and filled */
    int64_t format;                           /* FP32 or BF16 */
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
    void *keys[r->n_parts], *values[r->n_parts];
    int32_t format[r->n_parts];
    KVView view = {r->part, r->capacity, r->position, keys, values, format, r->longest};
    for (int layer = 0; layer < s->n_layers; layer++, x = out) {
        for (int p = 0; p < r->n_parts; p++) {
            const KVPointers *pointers = kv[layer * r->n_parts + p];
            int64_t offset = loop_step ? (loop_step[p] - 1) % pointers->max_levels * pointers->level_size : 0;
            offset *= format_bytes(format[p] = (int32_t)pointers->format);
            keys[p] = (char *)pointers->keys + offset, values[p] = (char *)pointers->values + offset;
        }
        const Block *next = layer + 1 < s->n_layers ? s->blocks[layer + 1] : 0;
        block_in_stage(threads, r->n, s->blocks[layer], next, layer > 0, x, cos, sin, &view, scratch, out);
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
} OutputHead;

/* Rows inside a loop group. An update is the change of a row's state in one step, after - before. */
typedef struct {
    const float *x;                    /* (n, C): states; never written */
    float *buffer_a, *buffer_b;        /* (n, C): the states after the 1st, 3rd, ... and after the 2nd, 4th, ... step of a call */
    const float *injected;             /* (n, C): what the input adds to every step; null: nothing */
    const float *cos, *sin;
    float *previous_update;            /* (n, C): the newest update of each row, NaN before its first step; null: no statistic needs it */
    float *norms;                      /* (n, 5) of `update_norms`, if `previous_update` is given */
    const KVPointers *const *kv;       /* (n_layers, n_parts) */
    int64_t *loop_step;                /* (n_parts,): loop steps taken */
    const int64_t *step_limit;          /* (n_parts,): the request's maximum number of loop steps, after which rows exit in any case */
    const Condition *conditions;       /* one for each rule; null: no row has a rule */
    const int32_t *condition_index;    /* (n,): index of each row's condition, -1: none; null: all have the first */
    const int32_t *index_in_condition; /* (n,): index of each row among the rows of its condition; null: the row itself */
    const OutputHead *lens;                  /* null: no statistic reads logits */
    float *lens_scratch;               /* min(n, LENS_ROWS) * (C + O) floats */
    double *statistics;                /* (n,): the statistic of each row's condition after its newest step */
    int64_t *streak;                   /* (n,): number of consecutive steps that have passed; null: `hits` is 1 in all conditions */
    uint8_t *fired, *exits;            /* (n,): rows whose rule fires after their newest step; rows that exit, also at step_limit */
    float *scratch;
    const int64_t *filled;             /* (n_parts,): the loop step up to which the levels of a part's cache are filled */
    float *result;                     /* (n, C): see `iterate`; null if it returns when the first rows exit */
    float *kept_inputs;                /* n * (C + 2 * rope_size), if `result` is given: injected, cos and sin of the rows that stay in the
                                        * loop, made contiguous */
    int64_t *kept_rows;                /* 3 * n, likewise: part, position and caller's index of these rows */
    int64_t rope_size;                 /* entries of cos and of sin for each row */
} LoopRows;

/* The rows that are still in the loop. Row t of them is row index[t] of the caller's arrays (index null: row t). */
typedef struct {
    RowSet set;
    const int64_t *index;
    const float *injected, *cos, *sin;
} ActiveRows;

static inline int caller_row(const ActiveRows *a, int t) { return a->index ? (int)a->index[t] : t; }

#define LENS_ROWS 32 /* rows whose logits are computed at a time */

static inline const Condition *condition_of(const LoopRows *l, int row) {
    if (!l->conditions || !l->condition_index) return l->conditions;
    return l->condition_index[row] < 0 ? 0 : l->conditions + l->condition_index[row];
}

/* The statistic of active row t; its logits are given if it reads them. */
static double row_statistic(const StageWeights *s, const ActiveRows *a, const LoopRows *l, const float *before, const float *after, int t,
                       float *logits) {
    int row = caller_row(a, t);
    RowStep step = {.C = s->C, .V = l->lens ? l->lens->V : 0, .loop_step = l->loop_step[a->set.part[t]], .before = before + (long)t * s->C,
                    .after = after + (long)t * s->C, .norms = l->norms ? l->norms + (long)NORMS * row : 0, .logits = logits};
    return statistic_of(condition_of(l, row), &step, l->index_in_condition ? l->index_in_condition[row] : row);
}

/* The statistics of all active rows that read logits. */
static void logit_statistics(int threads, const StageWeights *s, const ActiveRows *a, const LoopRows *l, const float *before, const float *after) {
    const OutputHead *lens = l->lens;
    int C = s->C, rows[LENS_ROWS], n = 0;
    float *states = l->lens_scratch, *logits = states + (long)(a->set.n < LENS_ROWS ? a->set.n : LENS_ROWS) * C;
    for (int t = 0; t < a->set.n; t++) {
        const Condition *condition = condition_of(l, caller_row(a, t));
        if (condition && reads_logits(condition->statistic)) {
            if (lens->gain) rms_norm_row(C, after + (long)t * C, lens->gain, lens->eps, states + (long)n * C);
            else memcpy(states + (long)n * C, after + (long)t * C, C * sizeof(float));
            rows[n++] = t;
        }
        if (n == LENS_ROWS || (n && t + 1 == a->set.n)) {
            linear(threads, n, lens->head, states, logits);
            for (int i = 0; i < n; i++)
                l->statistics[caller_row(a, rows[i])] = row_statistic(s, a, l, before, after, rows[i], logits + (long)i * lens->head->O);
            n = 0;
        }
    }
}

/* Which active rows exit after a step; returns whether any does. */
static int check_exits(int threads, const StageWeights *s, const ActiveRows *a, const LoopRows *l, const float *before, const float *after) {
    int any = 0;
    if (l->lens) logit_statistics(threads, s, a, l, before, after);
    for (int t = 0; t < a->set.n; t++) {
        int row = caller_row(a, t);
        int64_t loop_step = l->loop_step[a->set.part[t]];
        const Condition *condition = condition_of(l, row);
        l->fired[row] = 0;
        if (condition) {
            if (!reads_logits(condition->statistic)) l->statistics[row] = row_statistic(s, a, l, before, after, t, 0);
            int passed = condition->above ? l->statistics[row] > condition->tau : l->statistics[row] < condition->tau;
            /* `hits`: the number of consecutive steps that must pass */
            if (condition->hits > 1) passed = (l->streak[row] = (l->streak[row] + 1) * passed) >= condition->hits;
            l->fired[row] = passed && loop_step >= condition->min_steps;
        }
        l->exits[row] = l->fired[row] || loop_step >= l->step_limit[a->set.part[t]];
        any |= l->exits[row];
    }
    return any;
}

/* Whether the cache of an active row has no level for its next step. */
static int needs_level(const ActiveRows *a, const LoopRows *l) {
    for (int t = 0; t < a->set.n; t++)
        if (l->loop_step[a->set.part[t]] >= l->filled[a->set.part[t]]) return 1;
    return 0;
}

/* Copy the keys and values of the rows that exit to the deeper levels of their caches. Every row is a part of its own. */
static void fill_exited(const StageWeights *s, const ActiveRows *a, const LoopRows *l) {
    for (int t = 0; t < a->set.n; t++)
        for (int layer = 0; l->exits[caller_row(a, t)] && layer < s->n_layers; layer++) {
            int64_t p = a->set.part[t], step = l->loop_step[p];
            const KVPointers *kv = l->kv[layer * a->set.n_parts + p];
            if (step < kv->n_levels)
                fill_deeper_levels(s->blocks[layer]->J, s->blocks[layer]->D, (int)kv->format, a->set.capacity[p], a->set.position[t], step - 1,
                                   step, kv->n_levels, kv->keys, kv->values);
        }
}

/* Move row `from` of an array with rows of `size` floats to row `to` of another one, which may be the same. */
static inline void move_row(float *out, const float *in, int to, int from, long size) {
    if (in) memmove(out + to * size, in + from * size, size * sizeof(float));
}

/* Write the states of the rows that exit to `result` and make the others contiguous, their states `after` included. */
static void remove_exited(const StageWeights *s, ActiveRows *a, const LoopRows *l, int n_all, const float *before, float *after) {
    long C = s->C, D = l->rope_size;
    float *injected = l->kept_inputs, *cos = injected + n_all * C, *sin = cos + n_all * D;
    int64_t *part = l->kept_rows, *position = part + n_all, *index = position + n_all;
    int n = 0;
    for (int t = 0; t < a->set.n; t++) {
        int row = caller_row(a, t);
        if (l->exits[row]) {
            const Condition *condition = condition_of(l, row);
            move_row(l->result, l->fired[row] && condition->return_previous ? before : after, row, t, C);
            continue;
        }
        move_row(after, after, n, t, C);
        move_row(injected, a->injected, n, t, C);
        move_row(cos, a->cos, n, t, D);
        move_row(sin, a->sin, n, t, D);
        part[n] = a->set.part[t], position[n] = a->set.position[t], index[n++] = row;
    }
    a->set.n = n, a->set.part = part, a->set.position = position, a->index = index;
    a->injected = a->injected ? injected : 0, a->cos = a->cos ? cos : 0, a->sin = a->sin ? sin : 0;
}

/* Loop steps until rows exit, `max_steps` are taken, a cache has no level for the next step, or *interrupt is not 0; returns the number of
 * steps. Precondition: the levels of the first step are filled. Where every row is a part of its own, the deeper levels of rows that exit
 * are filled.
 *
 * With `result` the other rows go on for at most `steps_after_exit` steps when the first have exited (*first_exit: after how many steps that
 * was, 0: none has). Every row must then be a part of its own. `result` gets the output of the rows that exit, and the states of those that
 * have not; `loop_step` tells how many steps each has taken. */
int iterate(int threads, const StageWeights *s, const RowSet *r, const LoopRows *l, int max_steps, int steps_after_exit, int32_t *first_exit,
            const int32_t *interrupt) {
    int C = s->C, steps = 0, one_row_per_part = r->n == r->n_parts;
    ActiveRows a = {*r, 0, l->injected, l->cos, l->sin};
    const float *before = l->x;
    *first_exit = 0;
    while (a.set.n && steps < max_steps && !(*first_exit && (!l->result || steps - *first_exit >= steps_after_exit)) && !needs_level(&a, l)) {
        float *after = steps % 2 ? l->buffer_b : l->buffer_a;
        const float *input = before;
        int n = a.set.n;
        long size = (long)n * C;
        if (a.index) for (int t = 0; t < n; t++) l->loop_step[a.set.part[t]]++;
        else for (int p = 0; p < r->n_parts; p++) l->loop_step[p]++;
        if (s->state_weight) linear(threads, n, s->state_weight, before, after), input = after;
        if (a.injected) {
            for (long i = 0; i < size; i++) after[i] = input[i] + a.injected[i];
            input = after;
        }
        apply_layers(threads, s, &a.set, l->kv, l->loop_step, input, a.cos, a.sin, l->scratch, after);
        if (s->norm_gain) rms_norm(size < MIN_PARALLEL_SIZE ? 1 : threads, n, C, after, s->norm_gain, s->norm_eps, after);
        if (l->previous_update && !a.index)
            update_norms(size < MIN_PARALLEL_SIZE ? 1 : threads, n, C, before, after, l->previous_update, l->norms);
        else if (l->previous_update)
            for (int t = 0; t < n; t++) {
                long row = a.index[t];
                update_norms(1, 1, C, before + (long)t * C, after + (long)t * C, l->previous_update + row * C, l->norms + row * NORMS);
            }
        steps++;
        if (check_exits(threads, s, &a, l, before, after)) {
            if (!*first_exit) *first_exit = steps;
            if (one_row_per_part) fill_exited(s, &a, l);
            if (l->result) remove_exited(s, &a, l, r->n, before, after);
        }
        before = after;
        if (__atomic_load_n(interrupt, __ATOMIC_RELAXED)) break;
    }
    if (l->result) for (int t = 0; t < a.set.n; t++) move_row(l->result, before, caller_row(&a, t), t, C);
    return steps;
}
