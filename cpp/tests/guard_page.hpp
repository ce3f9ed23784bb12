#pragma once
// Memory that ends at memory which cannot be read or written: one byte too far is a crash.

#include <cstddef>
#include <cstdlib>

#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace npattn {
namespace {

class GuardPage {
public:
    explicit GuardPage(std::size_t bytes = 0) : half((bytes / granule + 1) * granule) {
#if defined(_WIN32)
        memory =
            static_cast<char*>(VirtualAlloc(nullptr, 2 * half, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
        DWORD before;
        if (memory == nullptr || !VirtualProtect(memory + half, half, PAGE_NOACCESS, &before)) std::abort();
#else
        void* mapped = mmap(nullptr, 2 * half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) std::abort();
        memory = static_cast<char*>(mapped);
        if (mprotect(memory + half, half, PROT_NONE) != 0) std::abort();
#endif
    }
    ~GuardPage() {
#if defined(_WIN32)
        VirtualFree(memory, 0, MEM_RELEASE);
#else
        munmap(memory, 2 * half);
#endif
    }
    GuardPage(const GuardPage&) = delete;
    GuardPage& operator=(const GuardPage&) = delete;

    char* begin() const { return memory; }
    char* end() const { return memory + half; }
    std::size_t size() const { return half; }

private:
    static constexpr std::size_t granule = 65536; // a multiple of every page size in use
    std::size_t half;                             // what can be used; as much cannot
    char* memory;
};

} // namespace
} // namespace npattn
