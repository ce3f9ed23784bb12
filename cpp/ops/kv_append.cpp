// KVStore::append. Everything that may fail comes before the first change that others can see: pages are
// reserved, then written where nothing is yet, then sequences get them.

#include <cstring>
#include <optional>
#include <utility>

#include "core/aligned_buffer.hpp"
#include "core/parallel.hpp"
#include "dispatch/registry.hpp"
#include "ops/heads.hpp"
#include "ops/kv_store.hpp"
#include "ops/page_copy.hpp"
#include "ops/quantised.hpp"

namespace npattn {
namespace {

// Room for `more` elements, growing geometrically; true if it grew.
template <class T> bool make_room(std::vector<T>& elements, std::size_t more) {
    const std::size_t needed = elements.size() + more;
    if (needed <= elements.capacity()) return false;
    elements.reserve(std::max(needed, 2 * elements.capacity()));
    return true;
}

// Floats on their way to pages of a half type: rounded a piece at a time, which stays in the cache.
class Rounding {
public:
    // `tokens`: of one piece at most.
    Rounding(const PageLayout& layout, std::int64_t tokens, int threads)
        : layout_(layout),
          piece_(align_up(static_cast<std::size_t>(std::min(tokens, layout.page_keys) *
                                                   std::max(layout.head_dim, layout.value_dim)) *
                          sizeof(Float16))),
          scratch_(piece_ * static_cast<std::size_t>(threads), 0, threads) {}

    // The same tokens, contiguous; `plain` are contiguous too but for the distance between them.
    PlainTokens rounded(const PlainTokens& plain, Side side, std::int64_t tokens, int thread) const {
        const std::int64_t width = layout_.width(side);
        const std::ptrdiff_t token = width * layout_.item_bytes;
        char* const piece = scratch_.own() + piece_ * static_cast<std::size_t>(thread);
        active_table().heads->narrow(layout_.storage, plain.data, plain.token, piece, token, tokens, width);
        return {piece, token, layout_.item_bytes, nullptr};
    }

private:
    const PageLayout& layout_;
    std::size_t piece_;
    CallScratch scratch_;
};

// Whether rounding to a half type makes finite ones among the first counts[i] tokens of sequence i infinite.
bool tokens_overflow(TensorView tokens, Storage storage, const std::int64_t* counts, int threads) {
    if (!counts) return overflows(tokens, storage, threads);
    const std::int64_t sequences = std::exchange(tokens.shape[0], 1);
    for (std::int64_t i = 0; i < sequences; ++i, tokens.data += tokens.strides[0]) {
        tokens.shape[2] = counts[i];
        if (overflows(tokens, storage, threads)) return true;
    }
    return false;
}

} // namespace

class KVStore::Append {
public:
    explicit Append(KVStore& store)
        : store_(store), pool_(store.pool_), page_keys_(store.layout_.page_keys) {}
    Append(const Append&) = delete;
    Append& operator=(const Append&) = delete;

    ~Append() {
        if (done_) return;
        for (const std::int64_t page : taken_) pool_.drop(page);
        for (const std::int64_t page : disowned_) pool_.own(page);
    }

    // 0, or the pages needed if the pool has not so many.
    std::int64_t reserve(Slots slots, std::int64_t tokens, const std::int64_t* counts) {
        list_parts(slots, tokens, counts);
        leave_behind();
        const std::int64_t needed = count_pages();
        const std::int64_t free = pool_.free_pages();
        if (!pool_.fixed()) {
            pool_.reserve(needed);
        } else if (needed > free + static_cast<std::int64_t>(freed_.size())) {
            return needed;
        }
        widen_tables();
        // From here on nothing fails.
        if (pool_.fixed() && needed > free) {
            recycle();
            overwrites_ = true;
        }
        take_pages();
        return 0;
    }

    // Scales, of int8: (sequences, kv heads, tokens). Floats for pages of a half type are rounded, if so.
    void write(const TensorView& key, const TensorView& value, float* key_scales, float* value_scales,
               const Rounding* rounding, int threads) const {
        const PageLayout& layout = store_.layout_;
        std::int64_t tokens = 0, most_pages = 0;
        for (const Part& part : parts_) {
            tokens += part.count;
            most_pages = std::max(most_pages, part.pages);
            // All copies before all writes: the longest owner of a page may write on in it.
            if (part.copied >= 0)
                std::memcpy(pool_.address(targets_[part.first_target]), pool_.address(part.copied),
                            layout.page_bytes);
        }
        const auto part_count = static_cast<std::int64_t>(parts_.size());
        const auto write_piece = [&](std::int64_t task, int thread) {
            const std::int64_t page = task % most_pages, head = task / most_pages % layout.kv_heads;
            const Part& part = parts_[static_cast<std::size_t>(task / most_pages / layout.kv_heads)];
            if (page >= part.pages) return;
            const std::int64_t start = part.sequence->length;
            const std::int64_t origin = (start / page_keys_ + page) * page_keys_;
            const std::int64_t first = std::max(start, origin);
            const std::int64_t last = std::min(start + part.count, origin + page_keys_);
            char* const address =
                store_.head_address(targets_[part.first_target + static_cast<std::size_t>(page)], head);
            const auto move = [&](Side side, const TensorView& t, float* scales) {
                const PlainTokens all = {
                    t.data + part.row * t.strides[0] + head * t.strides[1], t.strides[2], t.strides[3],
                    scales ? scales + (part.row * layout.kv_heads + head) * t.shape[2] : nullptr};
                PlainTokens plain = all.from(first - start);
                if (rounding) plain = rounding->rounded(plain, side, last - first, thread);
                move_tokens(layout, side, address, first - origin, last - first, plain, true);
            };
            move(Side::key, key, key_scales);
            move(Side::value, value, value_scales);
        };
        const std::int64_t tasks = part_count * layout.kv_heads * most_pages;
        const auto token_bytes = static_cast<std::int64_t>(layout.page_bytes) / page_keys_;
        if (overwrites_ || tokens <= PARALLEL_BYTES / token_bytes) {
            for (std::int64_t task = 0; task < tasks; ++task) write_piece(task, 0);
        } else {
            parallel_for(tasks, threads, write_piece);
        }
    }

    void commit() noexcept {
        for (const Part& part : parts_) {
            Sequence& sequence = *part.sequence;
            for (std::int64_t page = part.left_from; page < part.left_to; ++page) {
                sequence.pages[static_cast<std::size_t>(page)] = -1;
                sequence.addresses[static_cast<std::size_t>(page)] = nullptr;
            }
            const auto kept = static_cast<std::size_t>(sequence.length / page_keys_);
            sequence.pages.resize(kept);
            sequence.addresses.resize(kept);
            for (std::int64_t page = 0; page < part.pages; ++page) {
                const std::int64_t target = targets_[part.first_target + static_cast<std::size_t>(page)];
                sequence.pages.push_back(target);
                sequence.addresses.push_back(pool_.address(target));
            }
            sequence.length += part.count;
            sequence.first = part.first;
        }
        recycle();
        done_ = true;
    }

private:
    // The tokens of one sequence.
    struct Part {
        Sequence* sequence;
        std::int64_t row, count;
        std::int64_t first;              // first_after the append
        std::int64_t left_from, left_to; // pages that the window leaves behind
        std::int64_t pages;  // that the tokens go to, the last one of the sequence or its copy among them
        std::int64_t copied; // that last page, where others own it too; -1
        std::size_t first_target; // the pages in targets_
    };

    void list_parts(Slots slots, std::int64_t tokens, const std::int64_t* counts) {
        parts_.reserve(slots.size());
        std::size_t touched = 0;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            const std::int64_t count = counts ? counts[i] : tokens;
            if (count == 0) continue;
            Sequence& sequence = store_.at(slots[i]);
            const std::int64_t start = sequence.length, tail = start / page_keys_;
            const std::int64_t pages = store_.layout_.pages(start + count) - tail;
            parts_.push_back({&sequence, static_cast<std::int64_t>(i), count, store_.first_after(sequence), 0,
                              0, pages, -1, 0});
            touched += static_cast<std::size_t>(pages);
        }
        targets_.reserve(touched);
        taken_.reserve(touched);
        // Of the owners of one last page the longest comes last, and may write on in it: whatever happens,
        // what the others hold is not touched.
        std::sort(parts_.begin(), parts_.end(),
                  [](const Part& a, const Part& b) { return a.sequence->length < b.sequence->length; });
    }

    // Pages no token of which any query can see from now on.
    void leave_behind() {
        for (Part& part : parts_) {
            const std::int64_t sinks = store_.layout_.pages(store_.settings_.sink_tokens);
            part.left_from = std::max(sinks, part.sequence->first / page_keys_);
            part.left_to = std::max(part.left_from, part.first / page_keys_);
            for (std::int64_t i = part.left_from; i < part.left_to; ++i) {
                // A sequence that shares the page may now come to write on in it: there is no way back then.
                if (!disown(part.sequence->pages[static_cast<std::size_t>(i)])) overwrites_ = true;
            }
        }
    }

    std::int64_t count_pages() {
        std::int64_t needed = 0;
        for (Part& part : parts_) {
            const std::int64_t tail = part.sequence->length / page_keys_;
            const bool begun = part.sequence->length % page_keys_ != 0;
            needed += part.pages - begun;
            if (!begun) continue;
            const std::int64_t page = part.sequence->pages[static_cast<std::size_t>(tail)];
            if (!pool_.shared(page)) continue;
            part.copied = page;
            disown(page);
            ++needed;
        }
        return needed;
    }

    void widen_tables() {
        bool wider = false;
        for (const Part& part : parts_) {
            wider |= make_room(part.sequence->pages, static_cast<std::size_t>(part.pages));
            wider |= make_room(part.sequence->addresses, static_cast<std::size_t>(part.pages));
        }
        if (wider) store_.count_tables();
    }

    void take_pages() noexcept {
        for (Part& part : parts_) {
            part.first_target = targets_.size();
            const std::int64_t tail = part.sequence->length / page_keys_;
            const bool writes_on = part.sequence->length % page_keys_ != 0 && part.copied < 0;
            if (writes_on) targets_.push_back(part.sequence->pages[static_cast<std::size_t>(tail)]);
            for (std::int64_t i = writes_on; i < part.pages; ++i) {
                taken_.push_back(pool_.take());
                targets_.push_back(taken_.back());
            }
        }
    }

    bool disown(std::int64_t page) {
        make_room(disowned_, 1);
        make_room(freed_, 1);
        disowned_.push_back(page);
        const bool last = pool_.disown(page);
        if (last) freed_.push_back(page);
        return last;
    }

    void recycle() noexcept {
        for (const std::int64_t page : freed_) pool_.recycle(page);
        freed_.clear();
    }

    KVStore& store_;
    PagePool& pool_;
    const std::int64_t page_keys_;
    std::vector<Part> parts_;
    std::vector<std::int64_t> targets_;  // the pages written, part by part
    std::vector<std::int64_t> taken_;    // those of them that were free
    std::vector<std::int64_t> disowned_; // a page once for each owner it lost
    std::vector<std::int64_t> freed_;    // those that lost the last one
    bool overwrites_ = false;            // pages are written that the sequences before the append still hold
    bool done_ = false;
};

std::int64_t KVStore::append(Slots slots, const TensorView& key, const TensorView& value, Storage tokens,
                             const std::int64_t* counts, bool may_overflow, int threads) {
    // Before anything is reserved: what is then written over cannot be restored.
    std::optional<Quantised> keys, values;
    std::optional<Rounding> rounding;
    if (layout_.scaled()) {
        keys.emplace(key, threads);
        values.emplace(value, threads);
    } else if (tokens != layout_.storage) {
        if (!may_overflow && (tokens_overflow(key, layout_.storage, counts, threads) ||
                              tokens_overflow(value, layout_.storage, counts, threads)))
            return OVERFLOWS;
        rounding.emplace(layout_, key.shape[2], threads);
    }
    Append append(*this);
    if (const std::int64_t needed = append.reserve(slots, key.shape[2], counts)) return needed;
    if (layout_.scaled()) {
        append.write(keys->integers(), values->integers(), keys->scales(), values->scales(), nullptr,
                     threads);
    } else {
        append.write(key, value, nullptr, nullptr, rounding ? &*rounding : nullptr, threads);
    }
    append.commit();
    return 0;
}

} // namespace npattn
