#include "dispatch/registry.hpp"

#include <atomic>
#include <cstring>

#define NPATTN_DECLARE(isa)                                                                                  \
    namespace isa {                                                                                          \
    extern const GemmTable gemm_table;                                                                       \
    extern const SoftmaxTable softmax_table;                                                                 \
    extern const AttentionTable attention_table;                                                             \
    extern const DecodeTable decode_table;                                                                   \
    extern const CachedTable cached_table;                                                                   \
    extern const RopeTable rope_table;                                                                       \
    extern const HeadsTable heads_table;                                                                     \
    extern const CeilingTable ceiling_table;                                                                 \
    extern const Int8Table int8_table;                                                                       \
    }
#define NPATTN_DECLARE_PAIRS(isa)                                                                            \
    namespace isa {                                                                                          \
    extern const Int8Table int8_table;                                                                       \
    extern const DotTable dot_table;                                                                         \
    extern const AttentionKernels<float> attention_pairs_table;                                              \
    extern const CachedKernels<float> cached_pairs_table;                                                    \
    }
#define NPATTN_TABLES(isa, cached_isa)                                                                       \
    &isa::gemm_table, &isa::attention_table, &isa::decode_table, &cached_isa::cached_table,                  \
        &isa::softmax_table, &isa::rope_table, &isa::heads_table, &isa::ceiling_table
#define NPATTN_PAIR_TABLES(isa)                                                                              \
    &isa::int8_table, &isa::dot_table, &isa::attention_pairs_table, &isa::cached_pairs_table

namespace npattn {

NPATTN_DECLARE(generic)
#ifdef NPATTN_HAS_AVX2
NPATTN_DECLARE(avx2)
#endif
#ifdef NPATTN_HAS_AVX512
NPATTN_DECLARE(avx512)
#endif
#ifdef NPATTN_HAS_AVX512BF16
NPATTN_DECLARE_PAIRS(avx512bf16)
namespace avx512bf16 {
extern const CachedTable cached_table;
}
#endif
#ifdef NPATTN_HAS_AVX512AMX
NPATTN_DECLARE_PAIRS(avx512amx)
#endif
#ifdef NPATTN_HAS_NEON
NPATTN_DECLARE(neon)
#endif

namespace {

// Best last.
const KernelTable all_tables[] = {
    {"generic", 0, NPATTN_TABLES(generic, generic), &generic::int8_table},
#ifdef NPATTN_HAS_AVX2
    {"avx2", FEATURE_AVX2, NPATTN_TABLES(avx2, avx2), &avx2::int8_table},
#endif
#ifdef NPATTN_HAS_AVX512
    {"avx512", FEATURE_AVX2 | FEATURE_AVX512, NPATTN_TABLES(avx512, avx512), &avx512::int8_table},
#endif
#ifdef NPATTN_HAS_AVX512BF16
    // With VNNI, for int8: every CPU that has the one has the other (Cooper Lake, Sapphire Rapids, Zen 4 on).
    {"avx512bf16", FEATURE_AVX2 | FEATURE_AVX512 | FEATURE_AVX512_BF16 | FEATURE_AVX512_VNNI,
     NPATTN_TABLES(avx512, avx512bf16), NPATTN_PAIR_TABLES(avx512bf16)},
#endif
#ifdef NPATTN_HAS_AVX512AMX
    {"avx512amx", FEATURE_AVX2 | FEATURE_AVX512 | FEATURE_AVX512_BF16 | FEATURE_AVX512_VNNI | FEATURE_AMX,
     NPATTN_TABLES(avx512, avx512bf16), NPATTN_PAIR_TABLES(avx512amx)},
#endif
#ifdef NPATTN_HAS_NEON
    {"neon", FEATURE_NEON, NPATTN_TABLES(neon, neon), &neon::int8_table},
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
