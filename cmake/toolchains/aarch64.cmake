# Cross-compiles for 64-bit ARM Linux with Debian's g++-aarch64-linux-gnu; tests run under qemu where it is installed:
# cmake -B build-aarch64 -DNPATTN_PYTHON=OFF -DCMAKE_TOOLCHAIN_FILE=cmake/toolchains/aarch64.cmake

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)

find_program(NPATTN_QEMU NAMES qemu-aarch64-static qemu-aarch64)
if(NPATTN_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${NPATTN_QEMU} -L /usr/aarch64-linux-gnu)
endif()
