#pragma once
// Keys and values of many sequences, in pages that sequences may share: what both caches are made of.
//
// Sequences are known by their slot. A page is written by its only owner: one that others own too is copied
// first. Nothing here locks: whoever calls holds the access, shared to read, exclusively to change.

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor_view.hpp"
#include "ops/access.hpp"
#include "ops/page_pool.hpp"

namespace npattn {

struct StoreSettings {
    std::int64_t fixed_pages;    // pages taken at once and never more; 0: it grows
    std::int64_t capacity;       // tokens that a sequence may hold; 0: any number
    std::int64_t sliding_window; // tokens that a query sees, itself among them; 0: all
    std::int64_t sink_tokens;    // and the first ones of the sequence beside the window
};

struct PlainTokens; // page_copy.hpp

// Keys or values in plain order, and their scales (the same without the last axis) where they are int8.
struct PlainSide {
    char* data;
    float* scales;
};

class KVStore {
public:
    using Slots = std::span<const std::int64_t>;

    // What a store holds, apart from its memory: pages by number, in the order in which sequences have them.
    struct Contents {
        std::vector<std::vector<std::int64_t>>
            tables; // one a slot; -1: a page that the window has left behind
        std::vector<std::int64_t> lengths, firsts;
    };

    KVStore(const PageLayout& layout, const StoreSettings& settings, std::int64_t sequences);

    // The same in memory of its own, pages shared as there.
    KVStore(const KVStore& other);

    // What `contents` and `gather_pages` told of a store with these settings.
    KVStore(const PageLayout& layout, const StoreSettings& settings, const Contents& contents,
            std::int64_t pages, const PlainSide& keys, const PlainSide& values);

    Access& access() { return access_; }
    const PageLayout& layout() const { return layout_; }
    const StoreSettings& settings() const { return settings_; }
    const PagePool& pool() const { return pool_; }
    // All memory, the tables of the sequences too; from any thread.
    std::size_t bytes() const { return pool_.bytes() + table_bytes_.load(std::memory_order_relaxed); }
    std::int64_t slots() const { return static_cast<std::int64_t>(sequences_.size()); }
    std::int64_t length(std::int64_t slot) const { return at(slot).length; }

    // The pages of a sequence in order, null where the window has left one behind; and whether others own it too.
    const char* const* pages(std::int64_t slot) const { return at(slot).addresses.data(); }
    bool shared(std::int64_t slot, std::int64_t page) const {
        const std::int64_t number = at(slot).pages[static_cast<std::size_t>(page)];
        return number >= 0 && pool_.shared(number);
    }

    // Of the tokens past the sinks, the first that is still held.
    std::int64_t first_held(std::int64_t slot) const { return at(slot).first; }

    // The tokens that an append to the sequence may bring.
    std::int64_t room(std::int64_t slot) const;

    // The first counts[i] tokens (all of them where counts is null) of key (sequences, kv heads, tokens,
    // head_dim) and value (..., value_dim) behind those of sequence slots[i]; slots are distinct, tokens fit their
    // room. They are stored as the pages hold them, any strides, or (int8 always, the half types if so) as floats
    // in contiguous rows, which are rounded. 0, the number of pages that it takes and a fixed pool has not, or
    // OVERFLOWS, unless it may, where finite floats would become infinite: then, as after an exception, nothing has
    // changed.
    static constexpr std::int64_t OVERFLOWS = -1;
    std::int64_t append(Slots slots, const TensorView& key, const TensorView& value, Storage tokens,
                        const std::int64_t* counts, bool may_overflow, int threads);

    // There are so many tokens, and what the last one of them sees is held.
    bool may_crop(std::int64_t slot, std::int64_t length) const;

    // Keeps the first `length` tokens, as it may.
    void crop(std::int64_t slot, std::int64_t length) noexcept;

    // Slot i becomes what slot indices[i] was.
    void reorder(Slots indices);

    // The slot of a new sequence: with the tokens of another, or (from -1) empty.
    std::int64_t fork(std::int64_t from);
    void remove(std::int64_t slot) noexcept;

    // Keys or values of the sequences in plain order, (sequences, kv heads, length, width), C-contiguous and
    // zero before; places where no token is held stay so.
    void gather(Slots slots, Side side, std::int64_t length, const PlainSide& plain, int threads) const;

    // The pages of the sequences, by number, in `pages`; and in plain order, (pages, kv heads, page_keys,
    // width), as `gather` does.
    Contents contents(Slots slots, std::vector<std::int64_t>& pages) const;
    void gather_pages(const Contents& contents, Slots pages, Side side, const PlainSide& plain,
                      int threads) const;

private:
    struct Sequence {
        std::vector<std::int64_t> pages;
        std::vector<const char*> addresses; // of those pages
        std::int64_t length = 0;
        std::int64_t first = 0;
    };
    class Append; // one append that either happens or leaves no trace

    const Sequence& at(std::int64_t slot) const { return sequences_[static_cast<std::size_t>(slot)]; }
    Sequence& at(std::int64_t slot) { return sequences_[static_cast<std::size_t>(slot)]; }
    std::int64_t first_after(const Sequence& sequence) const;
    static std::size_t table_bytes(const Sequence& sequence);
    void count_tables() noexcept;
    void own_pages(const Sequence& sequence) noexcept;
    void drop_pages(const Sequence& sequence) noexcept;
    char* head_address(std::int64_t page, std::int64_t head) const;
    PlainTokens plain_head(const PlainSide& plain, Side side, std::int64_t head, std::int64_t length) const;
    std::vector<std::int64_t> take_pages(std::int64_t count);
    void adopt(const Contents& contents, Slots pages);

    PageLayout layout_;
    StoreSettings settings_;
    PagePool pool_;
    std::vector<Sequence> sequences_;
    std::vector<std::int64_t> vacant_; // slots of no sequence
    std::atomic<std::size_t> table_bytes_ = 0;
    Access access_;
};

} // namespace npattn
