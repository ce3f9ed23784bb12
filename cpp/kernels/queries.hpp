#pragma once
// Rows of queries as the register tile reads them: copies at a fixed distance from one another, ROW_DIMS head dims at
// a time, all `rows` of a task for the first of them before those for the next.

#include "kernels/attention.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr int TASK_ROWS = 96; // packed rows of most tasks: a multiple of every ISA's TILE_ROWS

// Elements along the depth of a product that lie in one P, and the P that hold `elements`.
template <class P> constexpr int TOGETHER = 1;
template <> constexpr int TOGETHER<HalfPair> = 2;
template <class P> constexpr std::int64_t depths(std::int64_t elements) {
    return (elements + TOGETHER<P> - 1) / TOGETHER<P>;
}

template <class P> constexpr std::int64_t ROW_DIMS = DEPTH_BLOCK* TOGETHER<P>; // of a copied row

template <class P> P* take_queries(std::int64_t rows, std::int64_t head_dim, Scratch& scratch) {
    return scratch.take<P>(rows * ROW_STRIDE * ((head_dim + ROW_DIMS<P> - 1) / ROW_DIMS<P>));
}

// Where the copy of a row of the task has head dim `dim`, a multiple of ROW_DIMS.
template <class P>
NPATTN_INLINE P* queries_at(P* queries, std::int64_t rows, std::int64_t row, std::int64_t dim) {
    return queries + (dim / ROW_DIMS<P> * rows + row) * ROW_STRIDE;
}

// `dims` elements of a query, stored as S, times the sign of the scale -> as P.
template <class S, class T>
NPATTN_INLINE void copy_query(const char* query, std::int64_t dims, bool negative, T* copy) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    const Vec<T> sign = broadcast<T>(negative ? T(-1) : T(1));
    each_vector<T>(0, dims, [&](std::int64_t e, auto part) NPATTN_BODY {
        store_part(copy + e, load_part<S>(query + e * size, part) * sign, part);
    });
}
template <class S>
NPATTN_INLINE void copy_query(const char* query, std::int64_t dims, bool negative, HalfPair* copy) {
    copy_pairs(query, 0, HALF, 1, dims, copy);
    if (!negative) return;
    constexpr std::uint16_t sign = 0x8000;
    for (std::int64_t d = 0; d < depths<HalfPair>(dims); ++d) {
        copy[d].even ^= sign;
        copy[d].odd ^= sign;
    }
}

// Rows [first, last) of the units whose queries begin at units[0], units[1], ...: row r is row r % n of unit r / n,
// each having n.
template <class P, class T>
void gather_queries(const AttentionCall<T>& call, const char* const* units, std::int64_t first,
                    std::int64_t last, std::int64_t rows, P* queries) {
    const std::int64_t unit_rows = call.query_len * call.group;
    with_storage<T>(call.query_storage, [&]<class S>(S) {
        for (std::int64_t r = first; r < last; ++r) {
            const std::int64_t row = r % unit_rows;
            const char* query = units[r / unit_rows] + row / call.group * call.query_position +
                                row % call.group * call.query_head;
            for (std::int64_t dim = 0; dim < call.head_dim; dim += ROW_DIMS<P>) {
                copy_query<S>(query + dim * static_cast<std::ptrdiff_t>(sizeof(S)),
                              smaller(ROW_DIMS<P>, call.head_dim - dim), call.scale < T(0),
                              queries_at(queries, rows, r - first, dim));
            }
        }
    });
}

} // namespace
} // namespace npattn::NPATTN_ISA
