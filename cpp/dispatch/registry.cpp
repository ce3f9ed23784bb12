#include "dispatch/registry.hpp"

#include <atomic>
#include <cstring>

#define NPATTN_DECLARE(isa)                                                                                  \
    namespace isa {                                                                                          \
    extern const GemmTable gemm_table;                                                                       \
    extern const SoftmaxTable softmax_table;                                                                 \
    extern const AttentionTable attention_table;                                                             \
    extern const DecodeTable decode_table;                                                                   \
    extern const RopeTable rope_table;                                                                       \
    extern const HeadsTable heads_table;                                                                     \
    extern const CeilingTable ceiling_table;                                                                 \
    }
// #isa at the start of a line is no directive, but is taken for one.
// clang-format off
#define NPATTN_ROW(isa, needs)                                                                               \
    KernelTable {                                                                                            \
        #isa, needs, &isa::gemm_table, &isa::attention_table, &isa::decode_table, &isa::softmax_table,       \
            &isa::rope_table, &isa::heads_table, &isa::ceiling_table                                         \
    }
// clang-format on

namespace npattn {

NPATTN_DECLARE(generic)
#ifdef NPATTN_HAS_AVX2
NPATTN_DECLARE(avx2)
#endif
#ifdef NPATTN_HAS_AVX512
NPATTN_DECLARE(avx512)
#endif
#ifdef NPATTN_HAS_NEON
NPATTN_DECLARE(neon)
#endif

namespace {

// Best last.
const KernelTable all_tables[] = {
    NPATTN_ROW(generic, 0),
#ifdef NPATTN_HAS_AVX2
    NPATTN_ROW(avx2, FEATURE_AVX2),
#endif
#ifdef NPATTN_HAS_AVX512
    NPATTN_ROW(avx512, FEATURE_AVX2 | FEATURE_AVX512),
#endif
#ifdef NPATTN_HAS_NEON
    NPATTN_ROW(neon, FEATURE_NEON),
#endif
};
constexpr std::size_t all_count = sizeof(all_tables) / sizeof(all_tables[0]);

struct Available {
    const KernelTable* tables[all_count];
    std::size_t count = 0;
    Available() noexcept {
        const std::uint64_t features = cpu_features();
        for (const KernelTable& table : all_tables) {
            if ((table.needs & ~features) == 0) tables[count++] = &table;
        }
    }
};

const Available& available() noexcept {
    static const Available found;
    return found;
}

std::atomic<const KernelTable*> active{nullptr};

} // namespace

std::span<const KernelTable* const> available_tables() noexcept {
    return {available().tables, available().count};
}

const KernelTable& active_table() noexcept {
    const KernelTable* table = active.load(std::memory_order_acquire);
    return table != nullptr ? *table : *available().tables[available().count - 1];
}

bool use_table(const char* name) noexcept {
    for (const KernelTable* table : available_tables()) {
        if (std::strcmp(table->name, name) == 0) {
            active.store(table, std::memory_order_release);
            return true;
        }
    }
    return false;
}

} // namespace npattn
