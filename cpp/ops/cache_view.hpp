#pragma once
// What attention sees of a cache: the pages of some sequences. A page holds `page_keys` tokens (a multiple of
// PANEL) of every kv head, a head's part after the other, `head_bytes` apart:
//
//   key panels [page_keys / PANEL][head_dim][PANEL], then, `value_offset` further, values [page_keys][value_dim]
//
// Token t of a sequence is token t % page_keys of its page t / page_keys.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace npattn {

struct CacheView {
    std::int64_t kv_heads, head_dim, value_dim, page_keys;
    std::ptrdiff_t head_bytes, value_offset;
    std::int64_t
        sliding_window; // a query sees itself and the tokens before it, this many in all; 0: all of them
    std::int64_t sink_tokens; // and the first tokens of the sequence, this many, beside the window

    // One entry a sequence.
    std::vector<const char* const*> pages; // its pages in order; null where the window has left one behind
    std::vector<std::int64_t> lengths;     // tokens seen
};

} // namespace npattn
