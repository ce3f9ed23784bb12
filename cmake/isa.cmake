# The only place with machine flags. `npattn_add_isa(name flags...)` compiles every kernel family of cpp/kernels once
# with those flags, into namespace npattn::<name>, and adds the objects to the list NPATTN_ISA_OBJECTS. An ISA that adds
# to another one compiles only what differs: npattn_add_isa(name KERNELS families... FLAGS flags...); its name begins
# with the other's.

include(CheckCXXCompilerFlag)

set(NPATTN_KERNELS gemm softmax attention decode cached rope heads ceiling int8)
set(NPATTN_PAIR_KERNELS dot attention_pairs cached_pairs int8) # for pairs of bfloat16, and quads of int8

function(npattn_add_isa name)
  cmake_parse_arguments(PARSE_ARGV 1 isa "" "" "KERNELS;FLAGS")
  if(NOT isa_KERNELS)
    set(isa_KERNELS ${NPATTN_KERNELS})
  endif()
  list(TRANSFORM isa_KERNELS PREPEND ${PROJECT_SOURCE_DIR}/cpp/kernels/ OUTPUT_VARIABLE sources)
  list(TRANSFORM sources APPEND .cpp)
  set(library npattn_${name})
  add_library(${library} OBJECT ${sources})
  target_include_directories(${library} PRIVATE ${PROJECT_SOURCE_DIR}/cpp)
  target_compile_definitions(${library} PRIVATE NPATTN_ISA=${name} NPATTN_ISA_${name})
  target_compile_options(${library} PRIVATE ${isa_FLAGS} ${isa_UNPARSED_ARGUMENTS} ${NPATTN_WARNINGS})
  if(MSVC)
    target_compile_options(${library} PRIVATE /O2 /fp:precise)
  else()
    # -Wno-*: a kernel unit uses part of the contract; GCC 12's own AVX-512 header trips its uninitialised check.
    target_compile_options(
      ${library} PRIVATE -O3 -fno-exceptions -fno-rtti -fno-lto -fno-math-errno -ffp-contract=off -fno-trapping-math
                         -Wno-unused-function -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set_target_properties(${library} PROPERTIES POSITION_INDEPENDENT_CODE ON INTERPROCEDURAL_OPTIMIZATION OFF)
  set(NPATTN_ISA_OBJECTS ${NPATTN_ISA_OBJECTS} $<TARGET_OBJECTS:${library}> PARENT_SCOPE)
  string(TOUPPER ${name} upper)
  set(NPATTN_ISA_DEFINITIONS ${NPATTN_ISA_DEFINITIONS} NPATTN_HAS_${upper} PARENT_SCOPE)
endfunction()

npattn_add_isa(generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  if(MSVC)
    npattn_add_isa(avx2 /arch:AVX2)
    npattn_add_isa(avx512 /arch:AVX512)
  else()
    npattn_add_isa(avx2 -mavx2 -mfma -mf16c)
    set(avx512 -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
    npattn_add_isa(avx512 ${avx512})
    list(APPEND avx512 -mavx512bf16 -mavx512vnni)
    npattn_add_isa(avx512bf16 KERNELS ${NPATTN_PAIR_KERNELS} cached FLAGS ${avx512})
    check_cxx_compiler_flag(-mamx-bf16 NPATTN_COMPILER_HAS_AMX)
    if(NPATTN_COMPILER_HAS_AMX)
      npattn_add_isa(avx512amx KERNELS ${NPATTN_PAIR_KERNELS} FLAGS ${avx512} -mamx-tile -mamx-bf16 -mamx-int8)
    endif()
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  # GCC 12 schedules the 6 x 4 tile into more registers than there are.
  npattn_add_isa(neon $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
endif()
