/* Quantise and pack, unpack and dequantise: what codecs/quantized.py does on a CPU, bit for bit.

   Each value is read from memory once, where torch's operations pass over it some nine times.
   Shapes: values [numel], in groups that share a range; starts [parts], the first element of each
   part, whose levels are packed together (bit_packing.py); extremes [2, groups]; noise, 15 bits for
   each group of a part and then for each place in a group, part by part, or NULL to round to the
   nearest. Extremes and values are float32 or bfloat16, which is the upper half of one. By channel,
   whose lowest values and spans are given, extremes are of shares of these, and float32. */

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define LARGEST_GROUP 8192
#define NUMEL_OF_A_SHARE (1 << 16) /* some ten microseconds, what a start of torch's threads takes */
#define MOST_THREADS 64
#define BITS_OF_256 0x43800000u /* as a float, whose last 15 bits are worth less than one */

/* Torch adds a product in one rounding where the processor can. */
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define MULTIPLY_ADD(a, b, c) fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

typedef struct {
    void *values, *extremes;
    uint8_t *packed;
    const int32_t *noise;
    const int64_t *starts;
    int64_t numel, parts, group_size;
    int bits, is_bfloat16;
    const float *lows, *spans; /* [channels], or NULL */
    int64_t channels, channel_stride;
} Work;

typedef struct {
    int64_t start, size; /* its first element, and its bytes */
    uint8_t *packed;
    const int32_t *of_groups, *of_places; /* noise */
} Part;

typedef struct {
    float low, shrink, per_unit, step;
} Grid; /* as UniformGrid */

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t groups_of(int64_t numel, int64_t group_size) {
    return (numel + group_size - 1) / group_size; /* the last one may be shorter */
}

static void from_bfloat16(const uint16_t *restrict halves, int64_t n, float *restrict values) {
    for (int64_t i = 0; i < n; i++) values[i] = float_of((uint32_t)halves[i] << 16);
}

static void to_bfloat16(const float *restrict values, int64_t n, uint16_t *restrict halves) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(values[i]); /* rounded to the nearest, to even between two */
        uint16_t nearest = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        halves[i] = values[i] != values[i] ? 0x7fc0 : nearest;
    }
}

static Grid grid_between(float low, float high, int top) {
    Grid grid;
    float largest = -low > high ? -low : high;
    grid.shrink = largest > (float)((double)FLT_MAX / 2) ? 0.25f : 1.0f;
    grid.low = low * grid.shrink;
    grid.per_unit = 1.0f / (high * grid.shrink - grid.low);
    grid.per_unit *= (float)(top * (1 - 2 * (double)FLT_EPSILON));
    if (grid.per_unit > FLT_MAX) grid.per_unit = FLT_MAX;
    grid.step = 1.0f / grid.per_unit;
    if (grid.shrink < 1) grid.step *= (float)(1 - 0x1p-20);
    return grid;
}

/* Bits of floats as integers of the same order, in which NaN lies beyond infinity; and back. */
static inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & INT32_MAX); }

static void find_extremes(const float *values, int64_t n, float *low, float *high) {
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int64_t i = 0; i < n; i++) { /* of integers a compiler may change the order */
        int32_t key = ordered((int32_t)bits_of(values[i]));
        least = key < least ? key : least;
        most = key > most ? key : most;
    }
    *low = float_of((uint32_t)ordered(least));
    *high = float_of((uint32_t)ordered(most));
    if (*low != *low || *high != *high) *low = *high = NAN;
}

static void find_levels(const float *restrict values, int64_t n, Grid grid, int top,
                        int32_t of_group, const int32_t *restrict of_places,
                        uint8_t *restrict levels) {
    if (of_places)
        for (int64_t i = 0; i < n; i++) {
            float noise = float_of(BITS_OF_256 + (uint32_t)(of_group ^ of_places[i]));
            float step = values[i] * grid.shrink - grid.low;
            levels[i] = (uint8_t)((int32_t)MULTIPLY_ADD(step, grid.per_unit, noise) & top);
        }
    else
        for (int64_t i = 0; i < n; i++) {
            float step = (values[i] * grid.shrink - grid.low) * grid.per_unit + 0.5f;
            levels[i] = (uint8_t)((int32_t)step & top);
        }
}

static void pack(const uint8_t *levels, int64_t first, int64_t n, Part part, int bits) {
    while (n > 0) {
        int64_t plane = first / part.size, byte = first % part.size;
        int64_t many = smaller(n, part.size - byte);
        if (plane == 0) /* is written before the others */
            memcpy(part.packed + byte, levels, (size_t)many);
        else
            for (int64_t i = 0; i < many; i++)
                part.packed[byte + i] |= (uint8_t)(levels[i] << plane * bits);
        levels += many, first += many, n -= many;
    }
}

static void unpack(Part part, int64_t first, int64_t n, int bits, uint8_t *restrict levels) {
    while (n > 0) {
        int64_t plane = first / part.size, byte = first % part.size;
        int64_t many = smaller(n, part.size - byte);
        for (int64_t i = 0; i < many; i++)
            levels[i] = part.packed[byte + i] >> plane * bits & ((1 << bits) - 1);
        levels += many, first += many, n -= many;
    }
}

static inline float share_of(float value, float low, float span) {
    return (value - low) * (span < FLT_MIN ? 0 : 1 / span);
}

static void to_shares(const Work *work, int64_t at, int64_t n, const float *values, float *shares) {
    for (int64_t many; n > 0; at += many, values += many, shares += many, n -= many) {
        int64_t channel = at / work->channel_stride % work->channels;
        const float *lows = work->lows + channel, *spans = work->spans + channel;
        if (work->channel_stride == 1) {
            many = smaller(n, work->channels - channel);
            for (int64_t i = 0; i < many; i++) shares[i] = share_of(values[i], lows[i], spans[i]);
        } else {
            many = smaller(n, work->channel_stride - at % work->channel_stride);
            for (int64_t i = 0; i < many; i++) shares[i] = share_of(values[i], *lows, *spans);
        }
    }
}

static void from_shares(const Work *work, int64_t at, int64_t n, float *values) {
    for (int64_t many; n > 0; at += many, values += many, n -= many) {
        int64_t channel = at / work->channel_stride % work->channels;
        const float *lows = work->lows + channel, *spans = work->spans + channel;
        if (work->channel_stride == 1) {
            many = smaller(n, work->channels - channel);
            for (int64_t i = 0; i < many; i++) values[i] = values[i] * spans[i] + lows[i];
        } else {
            many = smaller(n, work->channel_stride - at % work->channel_stride);
            for (int64_t i = 0; i < many; i++) values[i] = values[i] * *spans + *lows;
        }
    }
}

static void quantize_some(const Work *work, Part part, int64_t from, int64_t to) {
    float converted[LARGEST_GROUP];
    uint8_t unpacked[LARGEST_GROUP];
    int64_t groups = groups_of(work->numel, work->group_size);
    int top = (1 << work->bits) - 1;
    for (int64_t at = from, n; at < to; at += n) {
        int64_t group = at / work->group_size;
        const float *values = (const float *)work->values + at;
        uint8_t *levels = work->bits == 8 ? part.packed + (at - part.start) : unpacked;
        float low, high;
        n = smaller(work->group_size, to - at);
        if (work->is_bfloat16) {
            from_bfloat16((const uint16_t *)work->values + at, n, converted);
            values = converted;
        }
        if (work->lows) {
            to_shares(work, at, n, values, converted);
            values = converted;
        }
        find_extremes(values, n, &low, &high);
        if (work->is_bfloat16 && !work->lows) {
            to_bfloat16(&low, 1, (uint16_t *)work->extremes + group);
            to_bfloat16(&high, 1, (uint16_t *)work->extremes + groups + group);
        } else {
            ((float *)work->extremes)[group] = low;
            ((float *)work->extremes)[groups + group] = high;
        }
        if (isfinite(low) && isfinite(high))
            find_levels(values, n, grid_between(low, high, top), top,
                        part.of_groups ? part.of_groups[(at - part.start) / work->group_size] : 0,
                        part.of_places, levels);
        else
            memset(levels, 0, (size_t)n); /* any will do: none is a number again */
        if (work->bits < 8) pack(levels, at - part.start, n, part, work->bits);
    }
}

static void dequantize_some(const Work *work, Part part, int64_t from, int64_t to) {
    float converted[LARGEST_GROUP];
    uint8_t unpacked[LARGEST_GROUP];
    int64_t groups = groups_of(work->numel, work->group_size);
    for (int64_t at = from, n; at < to; at += n) {
        int64_t group = at / work->group_size;
        float *values = work->is_bfloat16 ? converted : (float *)work->values + at;
        const uint8_t *levels = work->bits == 8 ? part.packed + (at - part.start) : unpacked;
        float low, high;
        n = smaller(work->group_size, to - at);
        if (work->is_bfloat16 && !work->lows) {
            from_bfloat16((const uint16_t *)work->extremes + group, 1, &low);
            from_bfloat16((const uint16_t *)work->extremes + groups + group, 1, &high);
        } else {
            low = ((const float *)work->extremes)[group];
            high = ((const float *)work->extremes)[groups + group];
        }
        Grid grid = grid_between(low, high, (1 << work->bits) - 1);
        if (work->bits < 8) unpack(part, at - part.start, n, work->bits, unpacked);
        for (int64_t i = 0; i < n; i++) values[i] = levels[i] * grid.step + grid.low;
        if (grid.shrink < 1)
            for (int64_t i = 0; i < n; i++) values[i] /= grid.shrink;
        if (work->lows) from_shares(work, at, n, values);
        if (work->is_bfloat16) to_bfloat16(values, n, (uint16_t *)work->values + at);
    }
}

typedef void CodeSome(const Work *, Part, int64_t from, int64_t to);

/* Starts a function in that many threads and waits for them: OpenMP's `GOMP_parallel`. */
typedef void Team(void (*)(void *), void *, unsigned threads, unsigned flags);

typedef struct {
    const Work *work;
    CodeSome *code_some;
    int64_t shares;
    atomic_llong taken;
} Job;

static void code_between(const Work *work, CodeSome *code_some, int64_t from, int64_t to) {
    for (int64_t i = 0; i < work->parts; i++) {
        int64_t start = work->starts[i];
        int64_t end = i + 1 < work->parts ? work->starts[i + 1] : work->numel;
        Part part = {.start = start, .size = ((end - start) * work->bits + 7) / 8};
        part.packed = work->packed + start * work->bits / 8;
        if (work->noise) {
            part.of_groups = work->noise + start / work->group_size + i * work->group_size;
            part.of_places = part.of_groups + groups_of(end - start, work->group_size);
        }
        code_some(work, part, start > from ? start : from, smaller(end, to));
    }
}

/* Where a share begins: no byte is another's too. */
static int64_t boundary(const Work *work, int64_t share, int64_t shares) {
    if (share == shares) return work->numel;
    if (work->bits < 8) return work->starts[work->parts * share / shares];
    int64_t groups = work->numel / work->group_size;
    return groups * share / shares * work->group_size;
}

static void take_shares(void *argument) {
    Job *job = argument;
    const Work *work = job->work;
    for (int64_t i; (i = atomic_fetch_add(&job->taken, 1)) < job->shares;)
        code_between(work, job->code_some, boundary(work, i, job->shares),
                     boundary(work, i + 1, job->shares));
}

static void *take_shares_in_a_thread(void *job) {
    take_shares(job);
    return NULL;
}

/* In torch's own threads: after an operation they wait for the next one on their cores, so that
   others would have to share these with them. All of them, as OpenMP ends those that a team leaves
   out. */
static void in_threads(const Work *work, CodeSome *code_some, int threads, Team *team) {
    int64_t shares = work->numel / NUMEL_OF_A_SHARE;
    Job job = {.work = work, .code_some = code_some, .shares = shares > 1 ? shares : 1};
    if (team && threads > 1 && shares > 1) {
        team(take_shares, &job, threads, 0);
        return;
    }
    pthread_t others[MOST_THREADS];
    int64_t wanted = smaller(smaller(threads, MOST_THREADS), job.shares) - 1, number = 0;
    for (int64_t i = 0; i < wanted; i++)
        number += !pthread_create(&others[number], NULL, take_shares_in_a_thread, &job);
    take_shares(&job);
    while (number > 0) pthread_join(others[--number], NULL);
}

void quantize(const void *values, int is_bfloat16, int64_t numel, const int64_t *starts,
              int64_t parts, int64_t group_size, int bits, const int32_t *noise,
              uint8_t *packed, void *extremes, const float *lows, const float *spans,
              int64_t channels, int64_t channel_stride, int threads, Team *team) {
    Work work = {(void *)values, extremes,    packed, noise, starts,   numel,         parts,
                 group_size,     bits, is_bfloat16, lows,  spans, channels, channel_stride};
    in_threads(&work, quantize_some, threads, team);
}

void dequantize(const uint8_t *packed, const void *extremes, int is_bfloat16, int64_t numel,
                const int64_t *starts, int64_t parts, int64_t group_size, int bits, void *values,
                const float *lows, const float *spans, int64_t channels, int64_t channel_stride,
                int threads, Team *team) {
    Work work = {values, (void *)extremes, (uint8_t *)packed, NULL, starts, numel,    parts,
                 group_size, bits, is_bfloat16, lows, spans, channels, channel_stride};
    in_threads(&work, dequantize_some, threads, team);
}
