// Attention by the tiles of AMX (attention.h): scores of 16 slots, whose keys are read as they lie, and up to
// 16 queries at a time; then what the queries make of values, 32 slots at a time.

#ifdef TILES
// Values of two slots side by side, [pairs of runs, tiles of 16 numbers, 16 pairs of slots, 32]; of a run that
// isn't there zeros.
template <int E32>
static const __m512i *paired(const Held &held, int64_t runs) {
    static thread_local std::vector<__m512i> made;
    made.resize((runs + 1) / 2 * 32 * E32);
    __m512i *to = made.data();
    for (int64_t run = 0; run < runs; run += 2, to += 32 * E32)
        for (int s = 0; s < 32; s += 2)
            for (int c = 0; c < E32; c++) {
                __m512i one = {}, two = {};
                if (s < 16 || run + 1 < runs) {
                    const bf16 *x = held.values[run + s / 16] + s % 16 * held.step + 32 * c;
                    one = _mm512_loadu_si512(x), two = _mm512_loadu_si512(x + held.step);
                }
                to[32 * c + s / 2] = _mm512_unpacklo_epi16(one, two);
                to[32 * c + 16 + s / 2] = _mm512_unpackhi_epi16(one, two);
            }
    return made.data();
}
// Each query's scores for 16 slots from `first` on, of those by slots, [16, 16].
static inline void told(const Asking *of, int64_t count, const float *sums, int64_t first, float scale) {
    const __m512i each = _mm512_slli_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
    const int64_t few = 6;  // that are turned one by one
    __m512i turned[16];
    if (count > few) transposed16((const bf16 *)sums, 32, turned, 1);
    for (int64_t q = 0; q < count; q++) {
        __m512i own = count > few ? turned[q] : _mm512_i32gather_epi32(each, sums + q, 4);
        write(of[q].scores + first, (F16)own * scale);
    }
}
// As `mixed`, of up to 16 queries.
template <int E32>
static void mixed_by_tiles(const Asking *of, int64_t count, const Held &held, int64_t runs, Ahead &next) {
    const int64_t line = 2 * held.step;
    alignas(64) bf16 queries[16 * 32 * E32] = {};
    alignas(64) float sums[4][256];
    __m512i asked[16 * E32];
    for (int64_t q = 0; q < count; q++) memcpy(queries + 32 * E32 * q, of[q].query, 64 * E32);
    for (int c = 0; c < E32; c++) transposed16(queries + 32 * c, 32 * E32, asked + 16 * c, 1);
    for (int64_t run = 0; run < runs; run += 2) {
        const bf16 *one = held.keys[run], *two = held.keys[run + 1 < runs ? run + 1 : run];
        next.fetch();
        next.fetch();
        _tile_zero(0);
        _tile_zero(1);
        for (int c = 0; c < E32; c++) {
            _tile_loadd(4, asked + 16 * c, 64);
            _tile_loadd(5, one + 32 * c, line);
            _tile_dpbf16ps(0, 5, 4);
            _tile_loadd(6, two + 32 * c, line);
            _tile_dpbf16ps(1, 6, 4);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        told(of, count, sums[0], 16 * run, held.scale);
        if (run + 1 < runs) told(of, count, sums[1], 16 * (run + 1), held.scale);
    }
    hide(of, count, 16 * held.whole, 16 * runs);
    float factor[16];
    for (int64_t q = 0; q < count; q++) {
        factor[q] = shared(of[q], 16 * runs);
        if (runs % 2) write(of[q].shares + 16 * runs, (U8){});
    }
    for (int c = 0; c < E32; c += 2) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t run = 0; run < runs; run += 2) {
            const __m512i *from = held.pairs + (run / 2 * E32 + c) * 32;
            _tile_loadd(4, of[0].shares + 16 * run, 2 * held.apart);
            _tile_loadd(5, from, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, from + 16, 64);
            _tile_dpbf16ps(1, 4, 6);
            if (c + 1 == E32) continue;
            _tile_loadd(5, from + 32, 64);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, from + 48, 64);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int part = 0; part < 4 && c + part / 2 < E32; part += 2)
            for (int64_t q = 0; q < count; q++) {
                F16 low = read<F16>(sums[part] + 16 * q), high = read<F16>(sums[part + 1] + 16 * q);
                put_apart(of[q].out + 32 * (c + part / 2), low * factor[q], high * factor[q]);
            }
    }
}
#endif
