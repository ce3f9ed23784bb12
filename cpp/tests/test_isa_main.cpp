// main of the tests of one ISA, compiled without its machine flags: asks the CPU first.

#include <cstdio>
#include <cstring>

#include "check.hpp"
#include "dispatch/registry.hpp"

namespace npattn::NPATTN_ISA {
int NPATTN_TEST();
}

#define NPATTN_STRING_OF(x) #x
#define NPATTN_STRING(x) NPATTN_STRING_OF(x)

int main() {
    for (const npattn::KernelTable* table : npattn::available_tables()) {
        if (std::strcmp(table->name, NPATTN_STRING(NPATTN_ISA)) == 0)
            return npattn::NPATTN_ISA::NPATTN_TEST();
    }
    std::printf("skipped: this CPU has no %s\n", NPATTN_STRING(NPATTN_ISA));
    return npattn::SKIPPED;
}
