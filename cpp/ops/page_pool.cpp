#include "ops/page_pool.hpp"

#include <algorithm>
#include <limits>
#include <new>

namespace npattn {
PageLayout::PageLayout(std::int64_t heads, std::int64_t key_width, std::int64_t value_width,
                       std::int64_t keys, Storage stored)
    : kv_heads(heads), head_dim(key_width), value_dim(value_width), page_keys(keys), storage(stored),
      item_bytes(storage_bytes(stored)) {
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    const std::size_t column = bytes_product(size(page_keys), size(item_bytes));
    value_offset = align_up(bytes_product(column, size(depth())));
    scale_offset = align_up(value_offset + bytes_product(column, size(value_dim)));
    head_bytes = align_up(scale_offset + (scaled() ? bytes_product(size(page_keys), 2 * sizeof(float)) : 0));
    page_bytes = bytes_product(head_bytes, size(kv_heads));
}

PagePool::PagePool(std::size_t page_bytes, std::int64_t fixed_pages)
    : page_bytes_(page_bytes), fixed_(fixed_pages > 0) {
    if (fixed_) add_slab(fixed_pages);
}

void PagePool::reserve(std::int64_t count) {
    const std::int64_t missing = count - free_pages();
    if (missing <= 0) return;
    const std::int64_t generous = std::max(missing, pages() / 2);
    try {
        add_slab(generous);
    } catch (const std::bad_alloc&) {
        if (generous == missing) throw;
        add_slab(missing);
    }
}

std::int64_t PagePool::take() noexcept {
    const std::int64_t page = free_.back();
    free_.pop_back();
    owners_[static_cast<std::size_t>(page)] = 1;
    return page;
}

void PagePool::add_slab(std::int64_t count) {
    const auto added = static_cast<std::size_t>(count);
    const std::size_t before = addresses_.size(), after = before + added;
    AlignedBuffer slab(bytes_product(page_bytes_, added));
    slabs_.reserve(slabs_.size() + 1);
    addresses_.reserve(after);
    owners_.reserve(after);
    free_.reserve(after);
    // In the order of their addresses, as the last free page is taken first.
    for (std::size_t i = 0; i < added; ++i) addresses_.push_back(slab.as<char>() + i * page_bytes_);
    for (std::size_t i = added; i > 0; --i) free_.push_back(static_cast<std::int64_t>(before + i - 1));
    owners_.resize(after, 0);
    slab_bytes_ += slab.bytes();
    const std::size_t lists = addresses_.capacity() * sizeof(char*) +
                              owners_.capacity() * sizeof(std::int64_t) +
                              free_.capacity() * sizeof(std::int64_t);
    bytes_.store(slab_bytes_ + lists, std::memory_order_relaxed);
    slabs_.push_back(std::move(slab));
}

} // namespace npattn
