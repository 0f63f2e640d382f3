/* Several draft tokens of one sequence in one call: each goes through the network with few loop steps and without exit rules, and the token
 * that is sampled from it is the next one. The kernels are those of a pass of one row, so the tokens are the same. The structs below
 * have the same fields in the same order in library.py. */

/* A stage of the network for drafts. */
typedef struct {
    const StageWeights *weights;
    const KVPointers *const *kv; /* (n_layers) */
    int32_t steps;               /* loop steps of a draft; 0: a plain stage, and the fields below are not used */
    int32_t adds_input;          /* the input is added at every step */
    int32_t starts_with_input;   /* the initial state is the input */
    float norm_eps;
    const Matrix *input_weight;  /* the half of the input projection that multiplies the input; null: none */
    const float *start_states;   /* (positions, C): initial states; null: zeros, or the input */
    const float *norm_gain;      /* of the norm after the last step; null: none */
} DraftStage;

/* The network, one sequence and its sampling parameters. */
typedef struct {
    int32_t rope_size, n_stages, n_stops, top_k;
    const Embedding *embedding;
    const float *cos, *sin;        /* (positions, rope_size); null: none */
    const DraftStage *stages;
    const OutputHead *output_head;
    const int64_t *stops;          /* (n_stops,): tokens that end the text */
    int64_t capacity;              /* of the caches */
    float *scratch;                /* 4 C + O + sample_floats(V) floats, then the scratch memory of `block` */
    double top_p;
    float temperature;
} Drafter;

/* A loop group on one row x (C), in place. Deeper levels of the caches are not filled: drafts do not read them, and the verification
 * writes them all. */
static void draft_group(int threads, const DraftStage *s, const RowSet *row, float *x, const float *cos, const float *sin, float *buffers, float *scratch) {
    const StageWeights *w = s->weights;
    int64_t loop_step = 0, step_limit = s->steps, position = row->position[0];
    int32_t first_exit, no_interrupt = 0;
    double statistic;
    uint8_t fired, exits;
    KVPointers own[w->n_layers];
    const KVPointers *kv[w->n_layers];
    long size = w->C * sizeof(float);
    float *injected = buffers, *a = injected + w->C, *b = a + w->C;
    for (int i = 0; i < w->n_layers; i++) own[i] = *s->kv[i], own[i].n_levels = s->steps, kv[i] = &own[i];
    if (s->input_weight) linear(threads, 1, s->input_weight, x, injected);
    else if (s->adds_input) memcpy(injected, x, size);
    if (s->start_states) memcpy(x, s->start_states + position * w->C, size);
    else if (!s->starts_with_input) memset(x, 0, size);
    LoopRows rows = {.x = x, .buffer_a = a, .buffer_b = b, .injected = s->input_weight || s->adds_input ? injected : 0, .cos = cos, .sin = sin, .kv = kv,
                     .loop_step = &loop_step, .step_limit = &step_limit, .statistics = &statistic, .fired = &fired, .exits = &exits,
                     .scratch = scratch, .filled = &step_limit};
    iterate(threads, w, row, &rows, s->steps, 0, &first_exit, &no_interrupt);
    const float *after = s->steps % 2 ? a : b;
    if (s->norm_gain) rms_norm_row(w->C, after, s->norm_gain, s->norm_eps, x);
    else memcpy(x, after, size);
}

/* At most m tokens after `token`, which is at `position`: fewer if one of them is a stop token, which is the last then, or if *interrupt
 * is set. Returns their number. u holds a uniform number for each. */
int draft(int threads, const Drafter *d, int m, int64_t token, int64_t position, const double *u, int64_t *tokens, const int32_t *interrupt) {
    int64_t part = 0;
    int C = d->embedding->C, V = d->output_head->V;
    float *x = d->scratch, *buffers = x + C, *logits = x + 4L * C, *sampling = logits + d->output_head->head->O;
    float *scratch = sampling + sample_floats(V);
    for (int i = 0; i < m; i++, position++) {
        RowSet row = {1, 1, &part, &d->capacity, &position, position + 1};
        const float *cos = d->cos ? d->cos + position * d->rope_size : 0, *sin = d->sin ? d->sin + position * d->rope_size : 0;
        int32_t finite;
        if (!embed(1, d->embedding, &token, &position, x)) return i;
        for (const DraftStage *s = d->stages; s < d->stages + d->n_stages; s++) {
            if (s->steps) draft_group(threads, s, &row, x, cos, sin, buffers, scratch);
            else run_stage(threads, s->weights, &row, s->kv, x, cos, sin, scratch, x);
        }
        if (d->output_head->gain) rms_norm_row(C, x, d->output_head->gain, d->output_head->eps, x);
        linear(threads, 1, d->output_head->head, x, logits);
        sample(1, 1, V, logits, &d->temperature, &d->top_k, &d->top_p, u + i, sampling, &token, &finite);
        tokens[i] = token;
        for (int j = 0; j < d->n_stops; j++)
            if (token == d->stops[j]) return i + 1;
        if (__atomic_load_n(interrupt, __ATOMIC_RELAXED)) return i + 1;
    }
    return m;
}
