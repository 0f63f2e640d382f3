/* Vectors of eight floats.
 *
 * The C files are one translation unit, in the order of SOURCES in library.py, which compiles it once on the user's machine; it is called
 * through ctypes. Without a compiler the engine uses the `packed` kernels. Activations are fp32, weight matrices in one of the formats of
 * matmul.c; everything is contiguous unless a stride is given.
 *
 * A sum is taken in the same order for any number of rows, so a row's result is bit-equal in every batch.
 *
 * Shapes: n rows, C width, H query heads, J key/value heads, D head width, M hidden width of the MLP.
 */

#ifdef __AVX__
#include <immintrin.h>
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

static inline v8 load(const float *p) { v8 v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, v8 v) { memcpy(p, &v, sizeof v); }
static inline v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }
static inline float horizontal_sum(v8 v) { /* ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)) */
#ifdef __AVX__
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
#else
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}
/* Four sums at once, each ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
static inline void horizontal_sums(const v8 *v, float scale, float *s) {
#ifdef __AVX__
    __m256 t = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
    _mm_storeu_ps(s, _mm_mul_ps(_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)), _mm_set1_ps(scale)));
#else
    for (int i = 0; i < 4; i++)
        s[i] = (((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) + ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]))) * scale;
#endif
}

/* Comparisons, as masks of 32 bits a lane, and the larger and smaller of two. Intrinsics, because compilers make several instructions of the
 * plain operators where the CPU has AVX-512. */
#ifdef __AVX__
static inline v8i at_least(v8 a, v8 b) { return (v8i)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ); }
static inline v8 max8(v8 a, v8 b) { return (v8)_mm256_max_ps((__m256)a, (__m256)b); }
static inline v8 min8(v8 a, v8 b) { return (v8)_mm256_min_ps((__m256)a, (__m256)b); }
static inline unsigned lane_bits(v8i mask) { return _mm256_movemask_ps((__m256)mask); }
#else
static inline v8i at_least(v8 a, v8 b) { return a >= b; }
static inline v8 max8(v8 a, v8 b) { return (v8)(((v8i)a & (a > b)) | ((v8i)b & ~(a > b))); }
static inline v8 min8(v8 a, v8 b) { return (v8)(((v8i)a & (a < b)) | ((v8i)b & ~(a < b))); }
static inline unsigned lane_bits(v8i mask) {
    unsigned bits = 0;
    for (int i = 0; i < 8; i++) bits |= (mask[i] & 1u) << i;
    return bits;
}
#endif
static inline float horizontal_max(v8 v) { /* of numbers */
    v = max8(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = max8(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return v[0] > v[1] ? v[0] : v[1];
}
/* Stores the lanes of v whose mask is set one after the other, floats or integers; returns their number. May write all eight at `to`. */
static inline int store_lanes(void *to, v8i v, v8i mask) {
#ifdef __AVX512VL__
    __mmask8 lanes = (__mmask8)lane_bits(mask);
    _mm256_storeu_si256((__m256i *)to, _mm256_maskz_compress_epi32(lanes, (__m256i)v));
    return __builtin_popcount(lanes);
#else
    int n = 0;
    for (unsigned lanes = lane_bits(mask); lanes; lanes &= lanes - 1) {
        int32_t lane = v[__builtin_ctz(lanes)];
        memcpy((char *)to + 4 * n++, &lane, 4);
    }
    return n;
#endif
}
static inline v8 keep_where(v8i mask, v8 v) { return (v8)((v8i)v & mask); } /* 0 elsewhere */

static inline v8 blend(v8i mask, v8 a, v8 b) { return (v8)(((v8i)a & mask) | ((v8i)b & ~mask)); }

/* a b + c as one fused operation where the CPU has it. Written as an intrinsic: a compiler may fuse in one loop and not in another, and then
 * a row's last bits would depend on the number of rows. */
static inline v8 fma8(v8 a, v8 b, v8 c) {
#ifdef __FMA__
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return c + a * b;
#endif
}

/* e^x by 2^k e^r, |r| <= ln 2 / 2; within 2 units of the last place, NaN stays NaN. */
static inline v8 vexp(v8 x) {
    x = max8(splat(-87.3f), min8(splat(88.3f), x));
    v8 shifted = x * splat(1.44269504f) + splat(12582912.0f); /* rounds to an integer in the low bits */
    v8 k = shifted - splat(12582912.0f);
    v8 r = x - k * splat(0.693359375f);
    r = r - k * splat(-2.12194440e-4f);
    v8 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    v8i scale = ((v8i)shifted - (v8i)splat(12582912.0f) + 127) << 23;
    return p * (v8)scale;
}
