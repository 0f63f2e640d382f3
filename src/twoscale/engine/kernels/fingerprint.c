/* Fingerprints of weights. Compiled together with team.c, which comes first. */

/* 64-bit hashes of the bytes of `count` tensors, to detect that a weight has changed. A tensor is hashed in pieces of 1 MB, and a piece in
 * lanes: h = P(h) ^ word with a permutation P (one AES round, or a rotation and a multiplication by an odd constant). This is a bijection of h
 * for any word and of the word for any h, so a change within one word always changes its lane. Lanes and pieces are then folded into 64 bits; two
 * different contents collide with a probability of about 2^-64. A piece's hash depends on its index, and the hashes are combined by xor. The
 * memory's bandwidth is the limit, not the arithmetic; four streams through a piece at a time get more of it than one. */
#define PIECE (1 << 20)
#define STREAMS 4
#define LANES 4 /* of each stream */

static inline uint64_t mix64(uint64_t h, uint64_t word) { return ((h << 29 | h >> 35) * 0x9E3779B97F4A7C15u) ^ word; }

#ifdef __AES__
typedef __m128i Word;
static inline Word mix_word(Word h, Word word) { return _mm_aesenc_si128(h, word); }
static inline Word initial_lane(int j) { return _mm_set1_epi64x(j + 1); }
#else
typedef uint64_t Word;
static inline Word mix_word(Word h, Word word) { return mix64(h, word); }
static inline Word initial_lane(int j) { return j + 1; }
#endif

static uint64_t piece_hash(const unsigned char *p, int64_t bytes, uint64_t piece) {
    Word h[STREAMS * LANES], word;
    int64_t round_bytes = LANES * sizeof word, stream_bytes = bytes / (STREAMS * round_bytes) * round_bytes, i = STREAMS * stream_bytes;
    uint64_t hash = piece, halves[sizeof h / 8];
    for (int j = 0; j < STREAMS * LANES; j++) h[j] = initial_lane(j);
    for (int64_t k = 0; k < stream_bytes; k += round_bytes)
        for (int j = 0; j < STREAMS * LANES; j++) {
            memcpy(&word, p + j / LANES * stream_bytes + k + j % LANES * sizeof word, sizeof word);
            h[j] = mix_word(h[j], word);
        }
    for (int j = 0; i < bytes; i += sizeof word, j++) { /* at most STREAMS * LANES words */
        int64_t rest = bytes - i < (int64_t)sizeof word ? bytes - i : (int64_t)sizeof word;
        memset(&word, 0, sizeof word);
        memcpy(&word, p + i, rest);
        h[j] = mix_word(h[j], word);
    }
    for (int j = 0; j < STREAMS * LANES; j++) h[j] = mix_word(h[j], initial_lane(j));
    memcpy(halves, h, sizeof h);
    for (int j = 0; j < (int)(sizeof h / 8); j++) hash = mix64(hash, halves[j]);
    hash = mix64(hash, bytes);
    return hash ^ hash >> 32;
}

typedef struct {
    int count, pieces;
    const unsigned char *const *data;
    const int64_t *bytes;
    uint64_t *hashes;
} Weights;

static inline int pieces_of(int64_t bytes) { return (int)((bytes + PIECE - 1) / PIECE); }

static void fingerprints_task(const void *arguments, Thread *self) {
    const Weights *a = arguments;
    Phase phase = begin_phase(self, a->pieces, 1); /* the pieces of all tensors, numbered through */
    while (claim(self, &phase))
        for (int i = phase.first, t = 0, before = 0; i < phase.last; i++) {
            for (; i - before >= pieces_of(a->bytes[t]); t++) before += pieces_of(a->bytes[t]);
            int64_t offset = (int64_t)(i - before) * PIECE, size = a->bytes[t] - offset < PIECE ? a->bytes[t] - offset : PIECE;
            __atomic_fetch_xor(&a->hashes[t], piece_hash(a->data[t] + offset, size, (uint64_t)(i - before)), __ATOMIC_RELAXED);
        }
    finish_phase(self, &phase);
}

void fingerprints(int threads, int count, const unsigned char *const *data, const int64_t *bytes, uint64_t *hashes) {
    Weights a = {count, 0, data, bytes, hashes};
    memset(hashes, 0, count * sizeof *hashes);
    for (int t = 0; t < count; t++) a.pieces += pieces_of(bytes[t]);
    RUN_TASK(threads, fingerprints_task, a);
}
