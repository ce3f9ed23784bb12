// Strided copies of two-dimensional pieces: split_heads and merge_heads, and what the other kernels gather
// and scatter. And one that rounds, and what that loses.

#include "dispatch/kernel_table.hpp"
#include "kernels/each_vector.hpp"

namespace npattn::NPATTN_ISA {
namespace {

struct Piece {
    const char* source;
    std::ptrdiff_t source_row, source_column;
    char* destination;
    std::ptrdiff_t destination_row, destination_column;
    std::int64_t rows, columns;

    Piece transposed() const {
        return {source,          source_column, source_row, destination, destination_column,
                destination_row, columns,       rows};
    }
};

// Past the cache: whole aligned vectors, as floats, which moves any bits.
void copy_streamed(const char* from, char* to, std::int64_t bytes) {
    constexpr std::int64_t step = sizeof(Vec<float>);
    const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % step);
    std::int64_t i = past == 0 ? 0 : step - past;
    if (i > bytes) i = bytes;
    __builtin_memcpy(to, from, static_cast<std::size_t>(i));
    for (; i + step <= bytes; i += step) stream(to + i, load<float>(from + i));
    __builtin_memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

// Rows contiguous on both sides, `bytes` each; one long row where they follow one another.
void copy_rows(const Piece& p, std::int64_t bytes, bool past_cache) {
    const bool joined = p.source_row == bytes && p.destination_row == bytes;
    const std::int64_t rows = joined ? 1 : p.rows;
    const std::int64_t length = joined ? bytes * p.rows : bytes;
    for (std::int64_t r = 0; r < rows; ++r) {
        const char* from = p.source + r * p.source_row;
        char* to = p.destination + r * p.destination_row;
        if (past_cache) {
            copy_streamed(from, to, length);
        } else {
            __builtin_memcpy(to, from, static_cast<std::size_t>(length));
        }
    }
}

// Words, what a lane of Vec<T> holds, that follow one another along the rows of the source and along the columns
// of the destination: squares of registers, transposed. load(r, c, part) gives words [r, r + lanes) of column
// c. The longer side is the outer loop: memory is then walked along the shorter one, where the items of both
// sides lie close together.
template <class T, class Load>
NPATTN_INLINE void transpose_words(const Piece& p, std::int64_t columns, Load load_words) {
    constexpr int lanes = Vec<T>::lanes;
    constexpr std::int64_t size = sizeof(T);
    const auto square = [&](std::int64_t r, auto row_part, std::int64_t c, auto column_part) NPATTN_BODY {
        const std::int64_t row_count = p.rows - r < lanes ? p.rows - r : lanes;
        const std::int64_t column_count = columns - c < lanes ? columns - c : lanes;
        Vec<T> items[lanes];
        for (int j = 0; j < lanes; ++j)
            items[j] = j < column_count ? load_words(r, c + j, row_part) : zero<T>();
        transpose(items);
        for (int i = 0; i < row_count; ++i) {
            store_part(p.destination + (r + i) * p.destination_row + c * size, items[i], column_part);
        }
    };
    if (p.rows < columns) {
        each_vector<T>(0, columns, [&](std::int64_t c, auto column_part) {
            each_vector<T>(0, p.rows,
                           [&](std::int64_t r, auto row_part) { square(r, row_part, c, column_part); });
        });
    } else {
        each_vector<T>(0, p.rows, [&](std::int64_t r, auto row_part) {
            each_vector<T>(0, columns,
                           [&](std::int64_t c, auto column_part) { square(r, row_part, c, column_part); });
        });
    }
}

// Rows contiguous in the source, columns in the destination.
template <class T> void copy_transposed(const Piece& p) {
    transpose_words<T>(p, p.columns, [&](std::int64_t r, std::int64_t c, auto part) NPATTN_BODY {
        return load_part<T>(p.source + r * static_cast<std::int64_t>(sizeof(T)) + c * p.source_column, part);
    });
}

// Item by item; the inner loop runs where the source lies closer together.
template <std::size_t bytes> void copy_items(const Piece& p) {
    for (std::int64_t r = 0; r < p.rows; ++r) {
        const char* from = p.source + r * p.source_row;
        char* to = p.destination + r * p.destination_row;
        for (std::int64_t c = 0; c < p.columns; ++c) {
            __builtin_memcpy(to + c * p.destination_column, from + c * p.source_column, bytes);
        }
    }
}

// The same for items of 16 bits: two columns make a column of words.
void copy_transposed_halves(const Piece& p) {
    transpose_words<float>(p, p.columns / 2, [&](std::int64_t r, std::int64_t c, auto part) NPATTN_BODY {
        const char* column = p.source + 2 * r + 2 * c * p.source_column;
        return load_pairs_part(column, column + p.source_column, part);
    });
    if (p.columns % 2 != 0) {
        Piece last = p;
        last.source += (p.columns - 1) * p.source_column;
        last.destination += (p.columns - 1) * p.destination_column;
        last.columns = 1;
        copy_items<2>(last);
    }
}

void copy_any(const Piece& p, int item_bytes) {
    switch (item_bytes) {
    case 1:
        return copy_items<1>(p);
    case 2:
        return copy_items<2>(p);
    case 4:
        return copy_items<4>(p);
    case 8:
        return copy_items<8>(p);
    default:
        return copy_items<16>(p);
    }
}

// destination_rc = source_rc.
void copy(const char* source, std::ptrdiff_t source_row, std::ptrdiff_t source_column, char* destination,
          std::ptrdiff_t destination_row, std::ptrdiff_t destination_column, std::int64_t rows,
          std::int64_t columns, int item_bytes, bool past_cache) {
    Piece p = {source,          source_row,         source_column, destination,
               destination_row, destination_column, rows,          columns};
    if (source_column == item_bytes && destination_column == item_bytes) {
        return copy_rows(p, columns * item_bytes, past_cache);
    }
    const bool fits = item_bytes == 2 || item_bytes == 4 || item_bytes == 8;
    if (fits && source_column == item_bytes && destination_row == item_bytes) {
        p = p.transposed();
    }
    if (fits && p.source_row == item_bytes && p.destination_column == item_bytes) {
        return item_bytes == 2   ? copy_transposed_halves(p)
               : item_bytes == 4 ? copy_transposed<float>(p)
                                 : copy_transposed<double>(p);
    }
    const auto distance = [](std::ptrdiff_t stride) { return stride < 0 ? -stride : stride; };
    copy_any(distance(p.source_row) < distance(p.source_column) ? p.transposed() : p, item_bytes);
}

// destination_rc = source_rc to the nearest number of its type.
void narrow(Storage storage, const char* source, std::ptrdiff_t source_row, char* destination,
            std::ptrdiff_t destination_row, std::int64_t rows, std::int64_t columns) {
    with_storage<float>(storage, [&]<class S>(S) {
        for (std::int64_t r = 0; r < rows; ++r) {
            const char* const from = source + r * source_row;
            char* const to = destination + r * destination_row;
            each_vector<float>(0, columns, [&](std::int64_t c, auto part) NPATTN_BODY {
                store_part_as<S>(
                    to + c * static_cast<std::ptrdiff_t>(sizeof(S)),
                    load_part<float>(from + c * static_cast<std::ptrdiff_t>(sizeof(float)), part), part);
            });
        }
    });
}

// Whether finite numbers among source_rc are nearer to what would follow the largest one of the type, or as near.
bool overflows(Storage storage, const char* source, std::ptrdiff_t source_row, std::int64_t rows,
               std::int64_t columns) {
    const Vec<float> limit = broadcast<float>(storage == Storage::f16 ? 65520.f : 0x1.ffp127f);
    const Vec<float> infinity = broadcast<float>(__builtin_inff());
    Mask<float> found = first<float>(0);
    for (std::int64_t r = 0; r < rows; ++r) {
        each_vector<float>(0, columns, [&](std::int64_t c, auto part) NPATTN_BODY {
            const Vec<float> x = load_part<float>(
                source + r * source_row + c * static_cast<std::ptrdiff_t>(sizeof(float)), part);
            const Vec<float> magnitude = max(x, zero<float>() - x);
            found = either(found, both(less(magnitude, infinity), invert(less(magnitude, limit))));
        });
    }
    return any(found);
}

} // namespace

extern const HeadsTable heads_table;
const HeadsTable heads_table = {copy, narrow, overflows};

} // namespace npattn::NPATTN_ISA
