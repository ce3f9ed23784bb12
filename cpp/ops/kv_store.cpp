#include "ops/kv_store.hpp"

#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "core/parallel.hpp"
#include "ops/page_copy.hpp"

namespace npattn {

KVStore::KVStore(const PageLayout& layout, const StoreSettings& settings, std::int64_t sequences)
    : layout_(layout), settings_(settings), pool_(layout.page_bytes, settings.fixed_pages),
      sequences_(static_cast<std::size_t>(sequences)) {
    vacant_.reserve(sequences_.size());
    count_tables();
}

KVStore::KVStore(const KVStore& other) : KVStore(other.layout_, other.settings_, other.slots()) {
    std::vector<std::int64_t> all(other.sequences_.size());
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::int64_t> originals;
    const Contents contents = other.contents(all, originals);
    const std::vector<std::int64_t> pages = take_pages(static_cast<std::int64_t>(originals.size()));
    for (std::size_t i = 0; i < pages.size(); ++i)
        std::memcpy(pool_.address(pages[i]), other.pool_.address(originals[i]), layout_.page_bytes);
    adopt(contents, pages);
    vacant_.insert(vacant_.end(), other.vacant_.begin(), other.vacant_.end());
}

KVStore::KVStore(const PageLayout& layout, const StoreSettings& settings, const Contents& contents,
                 std::int64_t page_count, const PlainSide& keys, const PlainSide& values)
    : KVStore(layout, settings, static_cast<std::int64_t>(contents.lengths.size())) {
    const std::vector<std::int64_t> pages = take_pages(page_count);
    for (std::size_t i = 0; i < pages.size(); ++i) {
        for (std::int64_t head = 0; head < layout_.kv_heads; ++head) {
            const std::int64_t number = static_cast<std::int64_t>(i) * layout_.kv_heads + head;
            for (const auto& [side, plain] : {std::pair(Side::key, keys), std::pair(Side::value, values)}) {
                move_tokens(layout_, side, head_address(pages[i], head), 0, layout_.page_keys,
                            plain_head(plain, side, number, layout_.page_keys), true);
            }
        }
    }
    adopt(contents, pages);
}

std::int64_t KVStore::first_after(const Sequence& sequence) const {
    if (settings_.sliding_window == 0) return 0;
    return std::max(sequence.first, sequence.length - settings_.sliding_window + 1);
}

std::int64_t KVStore::room(std::int64_t slot) const {
    if (settings_.capacity == 0) return std::numeric_limits<std::int64_t>::max();
    const Sequence& sequence = at(slot);
    const std::int64_t sinks = std::min(settings_.sink_tokens, sequence.length);
    return settings_.capacity - (sinks + sequence.length - std::max(first_after(sequence), sinks));
}

std::size_t KVStore::table_bytes(const Sequence& sequence) {
    return sequence.pages.capacity() * sizeof(std::int64_t) + sequence.addresses.capacity() * sizeof(char*);
}

void KVStore::count_tables() noexcept {
    std::size_t bytes = sequences_.capacity() * sizeof(Sequence) + vacant_.capacity() * sizeof(std::int64_t);
    for (const Sequence& sequence : sequences_) bytes += table_bytes(sequence);
    table_bytes_.store(bytes, std::memory_order_relaxed);
}

void KVStore::own_pages(const Sequence& sequence) noexcept {
    for (const std::int64_t page : sequence.pages) {
        if (page >= 0) pool_.own(page);
    }
}

void KVStore::drop_pages(const Sequence& sequence) noexcept {
    for (const std::int64_t page : sequence.pages) {
        if (page >= 0) pool_.drop(page);
    }
}

bool KVStore::may_crop(std::int64_t slot, std::int64_t length) const {
    if (length < 0 || length > at(slot).length) return false;
    if (settings_.sliding_window == 0 || length <= settings_.sink_tokens) return true;
    return at(slot).first <= std::max(length - settings_.sliding_window, settings_.sink_tokens);
}

void KVStore::crop(std::int64_t slot, std::int64_t length) noexcept {
    Sequence& sequence = at(slot);
    const auto kept = static_cast<std::size_t>(layout_.pages(length));
    for (std::size_t i = kept; i < sequence.pages.size(); ++i) {
        if (sequence.pages[i] >= 0) pool_.drop(sequence.pages[i]);
    }
    sequence.pages.resize(kept);
    sequence.addresses.resize(kept);
    sequence.length = length;
    if (length <= settings_.sink_tokens) sequence.first = 0; // nothing is missing any more
}

void KVStore::reorder(Slots indices) {
    std::vector<Sequence> reordered;
    reordered.reserve(indices.size());
    for (const std::int64_t index : indices) reordered.push_back(at(index));
    for (const Sequence& sequence : reordered) own_pages(sequence);
    for (const Sequence& sequence : sequences_) drop_pages(sequence);
    sequences_ = std::move(reordered);
    count_tables();
}

std::int64_t KVStore::fork(std::int64_t from) {
    Sequence sequence = from < 0 ? Sequence() : at(from);
    std::int64_t slot = slots();
    if (vacant_.empty()) {
        // Room for all slots, so that removing cannot fail.
        if (vacant_.capacity() <= sequences_.size()) vacant_.reserve(2 * sequences_.size() + 1);
        sequences_.emplace_back();
    } else {
        slot = vacant_.back();
        vacant_.pop_back();
    }
    own_pages(sequence);
    at(slot) = std::move(sequence);
    count_tables();
    return slot;
}

void KVStore::remove(std::int64_t slot) noexcept {
    drop_pages(at(slot));
    at(slot) = Sequence();
    vacant_.push_back(slot);
    count_tables();
}

char* KVStore::head_address(std::int64_t page, std::int64_t head) const {
    return pool_.address(page) + head * static_cast<std::ptrdiff_t>(layout_.head_bytes);
}

PlainTokens KVStore::plain_head(const PlainSide& plain, Side side, std::int64_t head,
                                std::int64_t length) const {
    const std::ptrdiff_t row = layout_.width(side) * layout_.item_bytes;
    return {plain.data + head * length * row, row, layout_.item_bytes,
            plain.scales ? plain.scales + head * length : nullptr};
}

void KVStore::gather(Slots slots, Side side, std::int64_t length, const PlainSide& plain, int threads) const {
    const std::int64_t heads = layout_.kv_heads, pages = layout_.pages(length);
    const std::int64_t tasks = static_cast<std::int64_t>(slots.size()) * heads * pages;
    parallel_for(tasks, pages <= 1 ? 1 : threads, [&](std::int64_t task, int) {
        const std::int64_t page = task % pages, head = task / pages;
        const Sequence& sequence = at(slots[static_cast<std::size_t>(head / heads)]);
        const std::int64_t origin = page * layout_.page_keys;
        const std::int64_t end = std::min(origin + layout_.page_keys, sequence.length);
        const PlainTokens to = plain_head(plain, side, head, length);
        const auto move = [&](std::int64_t first, std::int64_t last) {
            if (first >= last) return;
            move_tokens(layout_, side,
                        head_address(sequence.pages[static_cast<std::size_t>(page)], head % heads),
                        first - origin, last - first, to.from(first), false);
        };
        const std::int64_t sinks = std::min(settings_.sink_tokens, sequence.length);
        move(origin, std::min(end, sinks));
        move(std::max({origin, sinks, sequence.first}), end);
    });
}

KVStore::Contents KVStore::contents(Slots slots, std::vector<std::int64_t>& pages) const {
    Contents contents;
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(pool_.pages()), -1);
    pages.clear();
    for (const std::int64_t slot : slots) {
        const Sequence& sequence = at(slot);
        std::vector<std::int64_t>& table = contents.tables.emplace_back();
        for (const std::int64_t page : sequence.pages) {
            if (page >= 0 && numbers[static_cast<std::size_t>(page)] < 0) {
                numbers[static_cast<std::size_t>(page)] = static_cast<std::int64_t>(pages.size());
                pages.push_back(page);
            }
            table.push_back(page < 0 ? -1 : numbers[static_cast<std::size_t>(page)]);
        }
        contents.lengths.push_back(sequence.length);
        contents.firsts.push_back(sequence.first);
    }
    return contents;
}

void KVStore::gather_pages(const Contents& contents, Slots pages, Side side, const PlainSide& plain,
                           int threads) const {
    std::vector<std::int64_t> filled(pages.size(), 0);
    for (std::size_t i = 0; i < contents.tables.size(); ++i) {
        std::int64_t left = contents.lengths[i];
        for (const std::int64_t number : contents.tables[i]) {
            if (number >= 0) {
                std::int64_t& tokens = filled[static_cast<std::size_t>(number)];
                tokens = std::max(tokens, std::min(left, layout_.page_keys));
            }
            left -= layout_.page_keys;
        }
    }
    const std::int64_t heads = layout_.kv_heads;
    parallel_for(static_cast<std::int64_t>(pages.size()) * heads, threads, [&](std::int64_t task, int) {
        const auto number = static_cast<std::size_t>(task / heads);
        move_tokens(layout_, side, head_address(pages[number], task % heads), 0, filled[number],
                    plain_head(plain, side, task, layout_.page_keys), false);
    });
}

std::vector<std::int64_t> KVStore::take_pages(std::int64_t count) {
    std::vector<std::int64_t> pages(static_cast<std::size_t>(count));
    if (!pool_.fixed()) pool_.reserve(count);
    for (std::int64_t& page : pages) page = pool_.take();
    return pages;
}

// The sequences of a store without any, their pages by number; whoever took the pages gives them up.
void KVStore::adopt(const Contents& contents, Slots pages) {
    for (std::size_t slot = 0; slot < sequences_.size(); ++slot) {
        Sequence& sequence = sequences_[slot];
        sequence.length = contents.lengths[slot];
        sequence.first = contents.firsts[slot];
        for (const std::int64_t number : contents.tables[slot]) {
            const std::int64_t page = number < 0 ? -1 : pages[static_cast<std::size_t>(number)];
            sequence.pages.push_back(page);
            sequence.addresses.push_back(page < 0 ? nullptr : pool_.address(page));
        }
        own_pages(sequence);
    }
    for (const std::int64_t page : pages) pool_.drop(page);
    count_tables();
}

} // namespace npattn
