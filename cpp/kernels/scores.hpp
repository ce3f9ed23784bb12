#pragma once
// What happens to a block of scores between the first product of attention and the online softmax: scale, softcap,
// bias, ALiBi and hiding. A block is up to KEY_BLOCK keys of a group of rows; a row of scores is contiguous, rows lie
// ROW_STRIDE apart.

#include "dispatch/kernel_table.hpp"
#include "kernels/each_vector.hpp"
#include "kernels/pack.hpp"
#include "simd/math.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr int KEY_BLOCK = DEPTH_BLOCK; // scores are the rows of the second product
constexpr std::int64_t UNBOUNDED = INT64_MAX;

// How scores leave the product of queries and keys. Where nothing but a positive scale touches them they stay
// as they are, and the softmax applies the scale; else they are brought to natural units first.
template <class T> struct ScoreUnits {
    bool natural; // transform() scales, caps and adds; factor is log2(e)
    T sign;       // the queries are packed times this
    T scale;
    T factor;  // exp(score) = 2^(factor * stored score)
    T to_nats; // stored score to the logarithm's unit

    explicit ScoreUnits(const AttentionCall<T>& call, const AttentionUnit<T>& unit) {
        sign = call.scale < T(0) ? T(-1) : T(1);
        scale = call.scale * sign;
        factor = scale * Constants<T>::log2_e;
        // Where the difference of two scores overflows, the smaller one's weight is 0 as it should be.
        constexpr T smallest_factor = sizeof(T) == 4 ? T(1e-36) : T(1e-304);
        const bool plain_factor = factor >= smallest_factor && factor < Constants<T>::infinity;
        natural = !plain_factor || call.softcap > T(0) || unit.addends[0] || unit.addends[1] || unit.slopes ||
                  unit.sinks || call.write == Write::scores;
        if (natural) factor = Constants<T>::log2_e;
        to_nats = natural ? T(1) : scale;
    }
};

// Keys [low, high) that a query at `position` of the query axis may see: causal, window and length together.
struct KeyRange {
    std::int64_t low, high;
    bool empty() const { return low >= high; }
    void join(const KeyRange& other) {
        if (other.low < low) low = other.low;
        if (other.high > high) high = other.high;
    }
};
template <class T>
NPATTN_INLINE KeyRange visible_keys(const AttentionCall<T>& call, const AttentionUnit<T>& unit,
                                    std::int64_t position) {
    const std::int64_t p = position + unit.query_offset;
    KeyRange range = {unit.key_first, unit.key_len};
    if (call.left != UNBOUNDED && p - call.left > range.low) range.low = p - call.left;
    if (call.right != UNBOUNDED && p + call.right + 1 < range.high) range.high = p + call.right + 1;
    if (call.causal && p + 1 < range.high) range.high = p + 1;
    return range;
}

// A row of the group: its query position, its head in the group, and the keys it may see.
struct Row {
    std::int64_t position, head;
    KeyRange keys;
};

// `count` elements of a strided row as a contiguous one: the row itself, or gathered into `buffer`.
template <class T>
NPATTN_INLINE const char* contiguous(const char* row, std::ptrdiff_t stride, int count, char* buffer) {
    if (stride == static_cast<std::ptrdiff_t>(sizeof(T))) return row;
    for (int j = 0; j < count; ++j) {
        store_one(buffer + j * static_cast<std::ptrdiff_t>(sizeof(T)), load_one<T>(row + j * stride));
    }
    return buffer;
}

enum class Visibility { none, some, all };

// What a bool mask shows of keys [begin, end) to a row.
template <class T>
Visibility mask_visibility(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const Row& row,
                           std::int64_t begin, std::int64_t end) {
    if (row.keys.low > begin) begin = row.keys.low;
    if (row.keys.high < end) end = row.keys.high;
    if (begin >= end) return Visibility::none;
    const char* mask =
        unit.mask + row.position * call.mask_position + row.head * call.mask_head + begin * call.mask_key;
    const int count = static_cast<int>(end - begin);
    if (call.mask_key == 0) return *mask ? Visibility::all : Visibility::none;
    char buffer[KEY_BLOCK];
    mask = contiguous<char>(mask, call.mask_key, count, buffer);
    unsigned char some = 0, every = 1; // of bytes, as many as a register has, compilers do the same
    for (int j = 0; j < count; ++j) {
        some |= static_cast<unsigned char>(mask[j]);
        every &= mask[j] != 0;
    }
    return every ? Visibility::all : some ? Visibility::some : Visibility::none;
}

// Hides columns [from, to) of a row of scores.
template <class T> NPATTN_INLINE void hide(T* scores, int from, int to) {
    const Vec<T> hidden = broadcast<T>(-Constants<T>::infinity);
    each_vector<T>(from, to,
                   [&](std::int64_t j, auto part) NPATTN_BODY { store_part(scores + j, hidden, part); });
}

// scores[j] for columns [begin, end) of the block at key `block`: scale, softcap, + addends, ALiBi; then -inf
// at every hidden key. `columns` (or null) receives 1 for each visible column, 0 for each hidden one.
template <class T>
void transform(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const ScoreUnits<T>& units,
               const Row& row, bool masked, std::int64_t block, int begin, int end, T* scores,
               std::uint8_t* visible_columns) {
    int from = begin; // the columns the row may see
    int to = end;
    if (row.keys.low > block + from) from = smaller(row.keys.low - block, end);
    if (row.keys.high < block + to)
        to = row.keys.high > block + from ? static_cast<int>(row.keys.high - block) : from;

    alignas(64) char mask_buffer[KEY_BLOCK];
    alignas(64) char addend_buffers[2][KEY_BLOCK * sizeof(T)];
    const char* mask = nullptr;
    const char* addends[2] = {nullptr, nullptr};
    if (masked) {
        mask = unit.mask + row.position * call.mask_position + row.head * call.mask_head +
               (block + from) * call.mask_key;
        mask = contiguous<char>(mask, call.mask_key, to - from, mask_buffer);
    }
    for (int a = 0; a < 2; ++a) {
        if (!unit.addends[a]) continue;
        addends[a] = unit.addends[a] + row.position * call.addend_position[a] +
                     row.head * call.addend_head[a] + (block + from) * call.addend_key[a];
        addends[a] = contiguous<T>(addends[a], call.addend_key[a], to - from, addend_buffers[a]);
    }
    const Vec<T> hidden_score = broadcast<T>(-Constants<T>::infinity);
    const Vec<T> scale = broadcast<T>(units.scale);
    const T cap = call.softcap;
    const Vec<T> per_cap = broadcast<T>(cap > T(0) ? T(1) / cap : T(0));
    const bool as_they_are = !units.natural && !visible_columns; // but for the mask
    if (as_they_are && mask) {
        each_vector<T>(from, to, [&](std::int64_t j, auto part) NPATTN_BODY {
            const Mask<T> visible = load_bytes_part<T>(mask + (j - from), part);
            store_part(scores + j, select(visible, load_part<T>(scores + j, part), hidden_score), part);
        });
    }
    each_vector<T>(from, as_they_are ? from : to, [&](std::int64_t j, auto part) NPATTN_BODY {
        const std::ptrdiff_t skip = j - from;
        Vec<T> s = load_part<T>(scores + j, part);
        Mask<T> visible = lanes_of<T>(part);
        if (units.natural) {
            s = s * scale;
            if (cap > T(0)) s = broadcast<T>(cap) * tanh(s * per_cap);
            if (unit.slopes) {
                const auto ahead = static_cast<T>(row.position + unit.query_offset - (block + j));
                const Vec<T> distance = broadcast<T>(ahead) - iota<T>();
                s = fnma(broadcast<T>(unit.slopes[row.head]), max(distance, zero<T>() - distance), s);
            }
            const Vec<T> unbiased = s;
            for (int a = 0; a < 2; ++a) {
                if (!addends[a]) continue;
                const Vec<T> addend =
                    load_part<T>(addends[a] + skip * static_cast<std::ptrdiff_t>(sizeof(T)), part);
                s = s + addend;
                visible = both(visible, invert(equal(addend, hidden_score)));
            }
            if (addends[0] && addends[1]) { // two low finite numbers are low, not hidden
                const Mask<T> overflown = both(equal(s, hidden_score), less(hidden_score, unbiased));
                s = select(overflown, broadcast<T>(-Constants<T>::largest), s);
            }
        }
        if (mask) visible = both(visible, load_bytes_part<T>(mask + skip, part));
        store_part(scores + j, select(visible, s, hidden_score), part);
        if (visible_columns) {
            std::uint8_t shown[Vec<T>::lanes];
            store_bytes(shown, visible);
            __builtin_memcpy(visible_columns + j, shown,
                             static_cast<std::size_t>(smaller(Vec<T>::lanes, to - j)));
        }
    });
    hide(scores, begin, from);
    hide(scores, to, end);
    if (visible_columns) {
        for (int j = begin; j < from; ++j) visible_columns[j] = 0;
        for (int j = to; j < end; ++j) visible_columns[j] = 0;
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
