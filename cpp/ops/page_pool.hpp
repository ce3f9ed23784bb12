#pragma once
// The memory of a cache: pages of one size, each with the number of its owners, in slabs that never move.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "core/bfloat16.hpp"

namespace npattn {

enum class Side { key, value };

// How a page lies in memory: `page_keys` tokens (a multiple of PANEL) of every kv head, a head's part after the
// other, `head_bytes` apart,
//
//   key panels [page_keys / PANEL][head_dim][PANEL], then, `value_offset` further, values [page_keys][value_dim];
//
// of int8 in quads (core/bfloat16.hpp), 128 added to each integer, as instructions multiply them:
//
//   key panels [page_keys / PANEL][(head_dim + 3) / 4][PANEL][4], filled with zeros,
//   values [page_keys / 4][value_dim][4],
//   then, at `scale_offset`, the scales of keys [page_keys] and of values [page_keys], floats
//
// Token t of a sequence is token t % page_keys of its page t / page_keys.
struct PageLayout {
    std::int64_t kv_heads, head_dim, value_dim, page_keys;
    Storage storage; // of keys and values
    int item_bytes;
    std::size_t value_offset, scale_offset, head_bytes, page_bytes;

    // std::bad_alloc where a page is larger than memory can be.
    PageLayout(std::int64_t kv_heads, std::int64_t head_dim, std::int64_t value_dim, std::int64_t page_keys,
               Storage storage);

    bool scaled() const { return storage == Storage::i8; }
    std::ptrdiff_t scales(Side side) const { // where they begin
        const auto first = static_cast<std::ptrdiff_t>(scale_offset);
        return side == Side::key ? first : first + page_keys * static_cast<std::ptrdiff_t>(sizeof(float));
    }
    std::int64_t depth() const { return scaled() ? int8_depth(head_dim) : head_dim; } // of a key panel
    std::int64_t width(Side side) const { return side == Side::key ? head_dim : value_dim; }
    std::int64_t pages(std::int64_t tokens) const { return (tokens + page_keys - 1) / page_keys; }
};

class PagePool {
public:
    // fixed_pages pages taken from the system now and never more; 0: as many as are asked for.
    PagePool(std::size_t page_bytes, std::int64_t fixed_pages);

    bool fixed() const { return fixed_; }
    std::int64_t pages() const { return static_cast<std::int64_t>(addresses_.size()); }
    std::int64_t free_pages() const { return static_cast<std::int64_t>(free_.size()); }
    std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); } // from any thread
    char* address(std::int64_t page) const { return addresses_[static_cast<std::size_t>(page)]; }

    // Room for `count` pages, grown geometrically; not for a fixed pool. std::bad_alloc leaves it as it was.
    void reserve(std::int64_t count);

    // A free page, which there must be, with one owner; its memory is as its last owner left it.
    std::int64_t take() noexcept;

    // One owner more, one less; disown returns true for the last, after whom the page is to be recycled.
    void own(std::int64_t page) noexcept { ++owners_[static_cast<std::size_t>(page)]; }
    bool disown(std::int64_t page) noexcept { return --owners_[static_cast<std::size_t>(page)] == 0; }
    void recycle(std::int64_t page) noexcept { free_.push_back(page); }
    bool shared(std::int64_t page) const { return owners_[static_cast<std::size_t>(page)] > 1; }

    void drop(std::int64_t page) noexcept {
        if (disown(page)) recycle(page);
    }

private:
    void add_slab(std::int64_t count);

    std::size_t page_bytes_;
    bool fixed_;
    std::size_t slab_bytes_ = 0;
    std::atomic<std::size_t> bytes_ = 0; // of the slabs and of what is known of their pages
    std::vector<AlignedBuffer> slabs_;
    std::vector<char*> addresses_;
    std::vector<std::int64_t> owners_;
    std::vector<std::int64_t>
        free_; // has room for all pages, so that recycling cannot fail; the last is taken first
};

} // namespace npattn
