/* Several tokens of one sequence in one call: each goes through the network, and the token that is sampled from it is the next one. With the
 * loops and exit rules of a request this is its decoding, with few loop steps and no rules it makes drafts of speculation. The kernels are
 * those of a pass of one row, so tokens, steps, keys and values are bit-equal to passes. The structs below have the same fields in the same
 * order in library.py. */

/* A stage of the network. */
typedef struct {
    const StageWeights *weights;
    const KVPointers *const *kv; /* (n_layers) */
    int32_t max_steps;           /* loop steps of a token at most; 0: a plain stage, and the fields below are not used */
    int32_t is_draft;            /* deeper levels are not filled: drafts do not read them, and the verification writes them all */
    int32_t needs_updates;       /* the statistic of the condition compares updates */
    int32_t adds_input;          /* the input is added at every step */
    int32_t starts_with_input;   /* the initial state is the input */
    float norm_eps;
    const Matrix *input_weight;  /* the half of the input projection that multiplies the input; null: none */
    const float *start_states;   /* (positions, C): initial states; null: zeros, or the input */
    const float *norm_gain;      /* of the norm after the last step; null: none */
    const Condition *condition;  /* of the exit rule; null: none */
    const OutputHead *lens;      /* null: the condition reads no logits */
} DecodeStage;

/* The network, one sequence and its sampling parameters. */
typedef struct {
    int32_t rope_size, n_stages, n_stops, top_k;
    const Embedding *embedding;
    const float *cos, *sin;        /* (positions, rope_size); null: none */
    const DecodeStage *stages;
    const OutputHead *output_head;
    const int64_t *stops;          /* (n_stops,): tokens that end the text */
    int64_t capacity;              /* of the caches */
    int64_t max_rows;              /* of a pass */
    float *scratch;                /* max_rows rows of `row_floats`, sample_floats(V) for each thread, then the scratch memory of `block` */
    double top_p;
    float temperature;
} Sequence;

/* Floats of a row in the scratch memory: its state, the five buffers of a loop group, what is kept of it while others exit, state and
 * logits for exit rules, and logits for sampling. */
static inline long row_floats(long C, long D, long O) { return 8 * C + 2 * D + 2 * O; }

/* A loop group on the rows x (n, C) of one sequence at successive positions, in place. `steps` of a row, every `stride` entries, gets its
 * loop steps. Returns 0 if the cache has no level for a step, or *interrupt is set. With a rule rows exit one by one, so each is a part of its own there. */
static int pass_group(int threads, const DecodeStage *s, const RowSet *set, float *x, const float *cos, const float *sin, long rope_size, float *buffers,
                      float *scratch, int32_t *steps, int stride, const int32_t *interrupt) {
    const StageWeights *w = s->weights;
    const Condition *condition = s->condition;
    int n = set->n, apart = n > 1 && condition, n_parts = apart ? n : 1;
    long C = w->C, all = (long)n * C, n_kv = (long)w->n_layers * n_parts;
    int64_t levels = s->kv[0]->n_levels, filled_to = levels == s->kv[0]->max_levels ? INT64_MAX : levels;
    int64_t loop_step[n], max_steps[n], filled[n], streak[n], part[n], capacity[n], kept_rows[3 * n];
    int32_t first_exit;
    double statistics[n];
    uint8_t fired[n], exits[n];
    float norms[n * NORMS], *injected = buffers, *a = injected + all, *b = a + all, *previous_update = b + all, *result = previous_update + all;
    float *kept_inputs = result + all, *lens_scratch = kept_inputs + n * (C + 2 * rope_size);
    KVPointers own[w->n_layers];
    const KVPointers *kv[n_kv];
    if (filled_to < 1 || (n > 1 && !condition && levels > s->max_steps)) return 0;
    for (int i = 0; i < n; i++)
        loop_step[i] = streak[i] = fired[i] = exits[i] = 0, max_steps[i] = s->max_steps, filled[i] = filled_to, part[i] = i, capacity[i] = set->capacity[0];
    for (int i = 0; i < w->n_layers; i++) {
        own[i] = *s->kv[i];
        if (s->is_draft) own[i].n_levels = s->max_steps;
        for (int p = 0; p < n_parts; p++) kv[i * n_parts + p] = &own[i];
    }
    if (s->input_weight) linear(threads, n, s->input_weight, x, injected);
    else if (s->adds_input) memcpy(injected, x, all * sizeof(float));
    if (s->start_states) for (int i = 0; i < n; i++) memcpy(x + i * C, s->start_states + set->position[i] * C, C * sizeof(float));
    else if (!s->starts_with_input) memset(x, 0, all * sizeof(float));
    if (condition) for (int64_t i = 0; i < n * condition->remembered_size; i++) condition->remembered[i] = NAN;
    if (s->needs_updates) for (long i = 0; i < all; i++) previous_update[i] = NAN;
    RowSet rows = apart ? (RowSet){n, n, part, capacity, set->position, set->longest} : *set;
    LoopRows l = {.x = x, .buffer_a = a, .buffer_b = b, .injected = s->input_weight || s->adds_input ? injected : 0, .cos = cos, .sin = sin,
                  .previous_update = s->needs_updates ? previous_update : 0, .norms = s->needs_updates ? norms : 0, .kv = kv, .loop_step = loop_step,
                  .step_limit = max_steps, .conditions = condition, .lens = s->lens, .lens_scratch = lens_scratch, .statistics = statistics,
                  .streak = streak, .fired = fired, .exits = exits, .scratch = scratch, .filled = filled, .result = apart ? result : 0,
                  .kept_inputs = kept_inputs, .kept_rows = kept_rows, .rope_size = cos ? rope_size : 0};
    int taken = iterate(threads, w, &rows, &l, s->max_steps, apart ? s->max_steps : 0, &first_exit, interrupt);
    for (int i = 0; i < n; i++)
        if (!exits[i]) return 0;
    const float *after = taken % 2 ? a : b, *before = taken == 1 ? x : taken % 2 ? b : a;
    const float *output = apart ? result : fired[0] && condition->return_previous ? before : after;
    for (int i = 0; i < n; i++) steps[i * stride] = (int32_t)loop_step[apart ? i : 0];
    if (s->norm_gain) for (int i = 0; i < n; i++) rms_norm_row(C, output + i * C, s->norm_gain, s->norm_eps, x + i * C);
    else if (output != x) memcpy(x, output, all * sizeof(float));
    return 1;
}

/* A pass of n tokens from `position` on, and the token that is sampled after each of them. `steps` (n, n_groups) gets their loop steps. u
 * holds a uniform number for each. Returns 0 if a cache has no level for a loop step, a row's logits are not finite, or *interrupt is set. */
int run_pass(int threads, const Sequence *d, int n, const int64_t *tokens, int64_t position, const double *u, int64_t *sampled, int32_t *steps, const int32_t *interrupt) {
    int C = d->embedding->C, V = d->output_head->V, O = d->output_head->head->O, n_groups = 0, group = 0;
    int64_t part[n], positions[n];
    int32_t finite[n], top_k[n];
    float temperature[n];
    double top_p[n];
    float *x = d->scratch, *buffers = x + (long)n * C, *logits = buffers + n * (row_floats(C, d->rope_size, O) - C - O), *sampling = logits + (long)n * O;
    float *scratch = sampling + threads * sample_floats(V);
    const float *cos = d->cos ? d->cos + position * d->rope_size : 0, *sin = d->sin ? d->sin + position * d->rope_size : 0;
    RowSet set = {n, 1, part, &d->capacity, positions, position + n};
    for (int i = 0; i < n; i++) part[i] = 0, positions[i] = position + i, temperature[i] = d->temperature, top_k[i] = d->top_k, top_p[i] = d->top_p;
    for (int i = 0; i < d->n_stages; i++) n_groups += d->stages[i].max_steps > 0;
    if (n > d->max_rows || !embed(n, d->embedding, tokens, positions, x)) return 0;
    for (const DecodeStage *s = d->stages; s < d->stages + d->n_stages; s++) {
        if (!s->max_steps) run_stage(threads, s->weights, &set, s->kv, x, cos, sin, scratch, x);
        else if (!pass_group(threads, s, &set, x, cos, sin, d->rope_size, buffers, scratch, steps + group++, n_groups, interrupt)) return 0;
    }
    for (int i = 0; i < n && d->output_head->gain; i++) rms_norm_row(C, x + (long)i * C, d->output_head->gain, d->output_head->eps, x + (long)i * C);
    linear(threads, n, d->output_head->head, x, logits);
    for (int i = 1; i < n && O > V; i++) memmove(logits + (long)i * V, logits + (long)i * O, V * sizeof(float));
    sample(n < threads ? n : threads, n, V, logits, temperature, top_k, top_p, u, sampling, sampled, finite);
    for (int i = 0; i < n; i++)
        if (!finite[i]) return 0;
    return 1;
}

/* At most m tokens after `token`, which is at `position`, each sampled from a pass of the one before. There are fewer if one of them is a stop
 * token, which is the last then, or if `run_pass` returns 0. Returns their number. */
int decode(int threads, const Sequence *d, int m, int64_t token, int64_t position, const double *u, int64_t *tokens, int32_t *steps, const int32_t *interrupt) {
    int n_groups = 0;
    for (int i = 0; i < d->n_stages; i++) n_groups += d->stages[i].max_steps > 0;
    for (int i = 0; i < m; i++, token = tokens[i - 1]) {
        if (!run_pass(threads, d, 1, &token, position + i, u + i, tokens + i, steps + i * n_groups, interrupt)) return i;
        for (int j = 0; j < d->n_stops; j++)
            if (tokens[i] == d->stops[j]) return i + 1;
        if (__atomic_load_n(interrupt, __ATOMIC_RELAXED)) return i + 1;
    }
    return m;
}
