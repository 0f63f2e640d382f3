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
    float *scratch;                /* 6 C + 2 O + sample_floats(V) floats, then the scratch memory of `block` */
    double top_p;
    float temperature;
} Sequence;

/* A loop group on one row x (C), in place; returns the loop steps taken, or 0 if the cache has no level for the next one. `buffers` has
 * 5 C + O floats. */
static int decode_group(int threads, const DecodeStage *s, const RowSet *row, float *x, const float *cos, const float *sin, float *buffers, float *scratch) {
    const StageWeights *w = s->weights;
    const Condition *condition = s->condition;
    int64_t loop_step = 0, max_steps = s->max_steps, position = row->position[0], streak = 0;
    int64_t filled = s->kv[0]->n_levels == s->kv[0]->max_levels ? INT64_MAX : s->kv[0]->n_levels;
    int32_t first_exit, no_interrupt = 0;
    double statistic;
    uint8_t fired = 0, exits = 0;
    KVPointers own[w->n_layers];
    const KVPointers *own_pointers[w->n_layers], *const *kv = s->kv;
    long C = w->C, size = C * sizeof(float);
    float *injected = buffers, *a = injected + C, *b = a + C, *previous_update = b + C, *lens_scratch = previous_update + C, norms[NORMS];
    if (s->is_draft) {
        for (int i = 0; i < w->n_layers; i++) own[i] = *s->kv[i], own[i].n_levels = max_steps, own_pointers[i] = &own[i];
        kv = own_pointers;
    }
    if (s->input_weight) linear(threads, 1, s->input_weight, x, injected);
    else if (s->adds_input) memcpy(injected, x, size);
    if (s->start_states) memcpy(x, s->start_states + position * C, size);
    else if (!s->starts_with_input) memset(x, 0, size);
    if (condition) for (int64_t i = 0; i < condition->remembered_size; i++) condition->remembered[i] = NAN;
    if (s->needs_updates) for (long i = 0; i < C; i++) previous_update[i] = NAN;
    LoopRows rows = {.x = x, .buffer_a = a, .buffer_b = b, .injected = s->input_weight || s->adds_input ? injected : 0, .cos = cos, .sin = sin, .kv = kv,
                     .previous_update = s->needs_updates ? previous_update : 0, .norms = s->needs_updates ? norms : 0, .loop_step = &loop_step, .step_limit = &max_steps,
                     .conditions = condition, .lens = s->lens, .lens_scratch = lens_scratch, .statistics = &statistic, .streak = &streak,
                     .fired = &fired, .exits = &exits, .scratch = scratch, .filled = &filled};
    if (filled < 1) return 0;
    int steps = iterate(threads, w, row, &rows, s->max_steps, 0, &first_exit, &no_interrupt);
    if (!exits) return 0;
    const float *after = steps % 2 ? a : b, *before = steps == 1 ? x : steps % 2 ? b : a;
    const float *output = fired && condition->return_previous ? before : after;
    if (s->norm_gain) rms_norm_row(C, output, s->norm_gain, s->norm_eps, x);
    else if (output != x) memcpy(x, output, size);
    return steps;
}

/* At most m tokens after `token`, which is at `position`. There are fewer if one of them is a stop token, which is the last then, if a cache
 * has no level for a loop step, if logits are not finite, or if *interrupt is set. Returns their number. u holds a uniform number for each;
 * `steps` (m, n_groups) gets the loop steps of each pass. */
int decode(int threads, const Sequence *d, int m, int64_t token, int64_t position, const double *u, int64_t *tokens, int32_t *steps, const int32_t *interrupt) {
    int64_t part = 0;
    int C = d->embedding->C, V = d->output_head->V, O = d->output_head->head->O;
    float *x = d->scratch, *buffers = x + C, *logits = buffers + 5L * C + O, *sampling = logits + O;
    float *scratch = sampling + sample_floats(V);
    for (int i = 0; i < m; i++, position++) {
        RowSet row = {1, 1, &part, &d->capacity, &position, position + 1};
        const float *cos = d->cos ? d->cos + position * d->rope_size : 0, *sin = d->sin ? d->sin + position * d->rope_size : 0;
        int32_t finite;
        if (!embed(1, d->embedding, &token, &position, x)) return i;
        for (const DecodeStage *s = d->stages; s < d->stages + d->n_stages; s++) {
            if (!s->max_steps) run_stage(threads, s->weights, &row, s->kv, x, cos, sin, scratch, x);
            else if (!(*steps++ = decode_group(threads, s, &row, x, cos, sin, buffers, scratch))) return i;
        }
        if (d->output_head->gain) rms_norm_row(C, x, d->output_head->gain, d->output_head->eps, x);
        linear(threads, 1, d->output_head->head, x, logits);
        sample(1, 1, V, logits, &d->temperature, &d->top_k, &d->top_p, u + i, sampling, &token, &finite);
        if (!finite) return i;
        tokens[i] = token;
        for (int j = 0; j < d->n_stops; j++)
            if (token == d->stops[j]) return i + 1;
        if (__atomic_load_n(interrupt, __ATOMIC_RELAXED)) return i + 1;
    }
    return m;
}
