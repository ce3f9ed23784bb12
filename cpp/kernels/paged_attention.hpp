#pragma once
// Attention over the pages of a cache, whatever its products are (see attention.hpp): CachedKernels from them.

#include "kernels/accumulate.hpp"
#include "kernels/queries.hpp"
#include "kernels/results.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// The panel of the block in which key j is was not among `panels`, one bit each: it is now.
NPATTN_INLINE bool first_time(unsigned& panels, int j) {
    const unsigned before = panels;
    panels |= 1u << (j / PANEL);
    return panels != before;
}

template <class Products, class T> struct PagedTask {
    Products products;
    RowBlock<T> rows;

    PagedTask(const AttentionCall<T>& call, const AttentionUnit<T>& unit, Scratch& scratch)
        : products(call, unit, scratch), rows(TASK_ROWS, scratch) {}
};

template <class Products, class T> std::size_t paged_scratch_bytes(const AttentionCall<T>& call) {
    Scratch counter(nullptr);
    const AttentionUnit<T> none = {};
    PagedTask<Products, T>(call, none, counter);
    return counter.used();
}

template <class Products, class T>
void attend_pages(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const char* const* queries,
                  std::int64_t first, std::int64_t last, std::int64_t key_first, std::int64_t key_last,
                  const AttentionPartial<T>& partial, void* memory) {
    const ProductRegisters<typename Products::Weight> registers;
    Scratch scratch(memory);
    PagedTask<Products, T> task(call, unit, scratch);
    task.rows.set(call, unit, first, last);
    task.products.copy_queries(queries, first, last);
    accumulate_safely(call, unit, task.rows, key_first, key_last, task.products, partial,
                      [](const Group<T>&, std::int64_t) {});
}

template <class T>
void finish_rows(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
                 std::int64_t last, const AttentionPartial<T>& whole, void* memory) {
    Scratch scratch(memory);
    RowBlock<T> rows(TASK_ROWS, scratch);
    rows.set(call, unit, first, last);
    for (std::int64_t r = 0; r < last - first; r += GROUP_ROWS)
        write_rows(call, unit, rows.groups[r / GROUP_ROWS], r, whole);
}

template <class Products, class T>
void fill_page_weights(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
                       std::int64_t last, const AttentionPartial<T>& whole, void* memory) {
    const ProductRegisters<typename Products::Weight> registers;
    Scratch scratch(memory);
    PagedTask<Products, T> task(call, unit, scratch);
    task.rows.set(call, unit, first, last);
    task.products.copy_queries(&unit.query, first, last);
    fill_weights(call, unit, task.rows, task.products, whole);
}

} // namespace
} // namespace npattn::NPATTN_ISA
