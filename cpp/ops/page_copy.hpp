#pragma once
// Tokens of one kv head between plain order, any strides, and a page (page_pool.hpp): items are moved bit
// for bit.

#include <algorithm>
#include <cstdint>

#include "dispatch/registry.hpp"
#include "ops/page_pool.hpp"

namespace npattn {

constexpr std::int64_t PARALLEL_BYTES = 262144; // less is moved by the calling thread alone

// The keys or the values of some tokens of a head, one behind the other.
struct PlainTokens {
    char* data;
    std::ptrdiff_t token, item;
    float* scales; // of int8, one a token

    PlainTokens from(std::int64_t first) const {
        return {data + first * token, token, item, scales ? scales + first : nullptr};
    }
};

// fill: plain -> slots [slot, slot + count) of the page; else from the page to plain.
inline void move_tokens(const PageLayout& layout, Side side, char* head, std::int64_t slot,
                        std::int64_t count, const PlainTokens& plain, bool fill) {
    const auto copy = active_table().heads->copy;
    const std::ptrdiff_t item = layout.item_bytes;
    // A matrix outside with a row for each row of the one inside.
    const auto move = [&](char* outside, std::ptrdiff_t outside_row, std::ptrdiff_t outside_column,
                          char* inside, std::ptrdiff_t inside_row, std::ptrdiff_t inside_column,
                          std::int64_t rows, std::int64_t columns) {
        if (fill) {
            copy(outside, outside_row, outside_column, inside, inside_row, inside_column, rows, columns,
                 layout.item_bytes, false);
        } else {
            copy(inside, inside_row, inside_column, outside, outside_row, outside_column, rows, columns,
                 layout.item_bytes, false);
        }
    };
    if (layout.scaled()) {
        auto* const scales = reinterpret_cast<float*>(head + layout.scales(side)) + slot;
        fill ? std::copy_n(plain.scales, count, scales) : std::copy_n(scales, count, plain.scales);
    }
    if (side == Side::value) {
        const std::ptrdiff_t row = layout.value_dim * item;
        char* const first = head + static_cast<std::ptrdiff_t>(layout.value_offset) + slot * row;
        move(plain.data, plain.token, plain.item, first, row, item, count, layout.value_dim);
        return;
    }
    for (std::int64_t done = 0; done < count;) {
        const std::int64_t at = slot + done, here = std::min(count - done, PANEL - at % PANEL);
        char* const lane = head + (at / PANEL * PANEL * layout.head_dim + at % PANEL) * item;
        // One token is a column whose stride is never used: 0 keeps the kernel from transposing squares.
        const bool one = here == 1;
        move(plain.from(done).data, plain.item, one ? 0 : plain.token, lane, PANEL * item, one ? 0 : item,
             layout.head_dim, here);
        done += here;
    }
}

} // namespace npattn
