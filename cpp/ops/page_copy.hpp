#pragma once
// Tokens of one kv head between plain order, any strides, and a page (page_pool.hpp): items are moved bit
// for bit.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dispatch/registry.hpp"
#include "ops/page_pool.hpp"

namespace npattn {

constexpr std::int64_t PARALLEL_BYTES = 262144; // less is moved by the calling thread alone

// The keys or the values of some tokens of a head, one behind the other.
struct PlainTokens {
    char* data;
    std::ptrdiff_t token, item; // item: 1 of int8
    float* scales;              // of int8, one a token

    PlainTokens from(std::int64_t first) const {
        return {data + first * token, token, item, scales ? scales + first : nullptr};
    }
};

// A matrix outside with a row for each row of the one inside, filled from it or filling it.
inline void move_matrix(char* outside, std::ptrdiff_t outside_row, std::ptrdiff_t outside_column,
                        char* inside, std::ptrdiff_t inside_row, std::ptrdiff_t inside_column,
                        std::int64_t rows, std::int64_t columns, int item_bytes, bool fill) {
    const auto copy = active_table().heads->copy;
    if (fill) {
        copy(outside, outside_row, outside_column, inside, inside_row, inside_column, rows, columns,
             item_bytes, false);
    } else {
        copy(inside, inside_row, inside_column, outside, outside_row, outside_column, rows, columns,
             item_bytes, false);
    }
}

// Columns of a panel, one a token: outside, each follows itself item by item.
inline void move_columns(char* outside, std::ptrdiff_t item, std::ptrdiff_t token, char* panel,
                         std::int64_t depth, std::int64_t tokens, int item_bytes, bool fill) {
    // One token is a column whose stride is never used: 0 keeps the kernel from transposing squares.
    const bool one = tokens == 1;
    move_matrix(outside, item, one ? 0 : token, panel, PANEL * item_bytes, one ? 0 : item_bytes, depth,
                tokens, item_bytes, fill);
}

// What int8 adds to integers in quads, and takes away again.
inline char moved_by_128(char byte) { return static_cast<char>(byte ^ 0x80); }

// Tokens of a panel of keys of int8, contiguous outside: by way of a copy whose bytes are the page's.
inline void move_quad_columns(const PlainTokens& plain, char* panel, std::int64_t head_dim,
                              std::int64_t tokens, bool fill) {
    constexpr std::int64_t piece = 256;
    alignas(64) char copy[PANEL * piece];
    for (std::int64_t first = 0; first < head_dim; first += piece) {
        const std::int64_t count = std::min(piece, head_dim - first), stored = int8_depth(count);
        const auto move = [&] {
            move_columns(copy, 4, piece, panel + first * PANEL, stored / 4, tokens, 4, fill);
        };
        if (!fill) move();
        for (std::int64_t t = 0; t < tokens; ++t) {
            char* const row = plain.data + t * plain.token + first;
            char* const copied = copy + t * piece;
            if (fill) {
                std::transform(row, row + count, copied, moved_by_128);
                std::fill(copied + count, copied + stored, moved_by_128(0));
            } else {
                std::transform(copied, copied + count, row, moved_by_128);
            }
        }
        if (fill) move();
    }
}

// Values of int8, contiguous outside, of slots [slot, slot + tokens).
inline void move_quad_rows(const PlainTokens& plain, char* values, std::int64_t value_dim, std::int64_t slot,
                           std::int64_t tokens, bool fill) {
    for (std::int64_t done = 0; done < tokens;) {
        const std::int64_t at = slot + done;
        char* const quads = values + at / 4 * 4 * value_dim + at % 4;
        const char* const row = plain.data + done * plain.token;
        if (fill && at % 4 == 0 && tokens - done >= 4) {
            for (std::int64_t c = 0; c < value_dim; ++c) {
                for (int i = 0; i < 4; ++i) quads[4 * c + i] = moved_by_128(row[i * plain.token + c]);
            }
            done += 4;
            continue;
        }
        char* const out = plain.data + done * plain.token;
        for (std::int64_t c = 0; c < value_dim; ++c) {
            if (fill) {
                quads[4 * c] = moved_by_128(row[c]);
            } else {
                out[c] = moved_by_128(quads[4 * c]);
            }
        }
        ++done;
    }
}

// fill: plain -> slots [slot, slot + count) of the page; else from the page to plain.
inline void move_tokens(const PageLayout& layout, Side side, char* head, std::int64_t slot,
                        std::int64_t count, const PlainTokens& plain, bool fill) {
    const std::ptrdiff_t item = layout.item_bytes;
    if (layout.scaled()) {
        auto* const scales = reinterpret_cast<float*>(head + layout.scales(side)) + slot;
        fill ? std::copy_n(plain.scales, count, scales) : std::copy_n(scales, count, plain.scales);
    }
    if (side == Side::value) {
        char* const values = head + static_cast<std::ptrdiff_t>(layout.value_offset);
        if (layout.scaled()) return move_quad_rows(plain, values, layout.value_dim, slot, count, fill);
        const std::ptrdiff_t row = layout.value_dim * item;
        return move_matrix(plain.data, plain.token, plain.item, values + slot * row, row, item, count,
                           layout.value_dim, layout.item_bytes, fill);
    }
    for (std::int64_t done = 0; done < count;) {
        const std::int64_t at = slot + done, here = std::min(count - done, PANEL - at % PANEL);
        char* const panel = head + at / PANEL * PANEL * layout.depth() * item;
        const PlainTokens tokens = plain.from(done);
        if (layout.scaled()) {
            move_quad_columns(tokens, panel + at % PANEL * 4, layout.head_dim, here, fill);
        } else {
            move_columns(tokens.data, plain.item, plain.token, panel + at % PANEL * item, layout.head_dim,
                         here, layout.item_bytes, fill);
        }
        done += here;
    }
}

} // namespace npattn
