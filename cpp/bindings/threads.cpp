// Threads seen from Python: the numbers python/npattn/_threads.py decides from, and Ctrl-C.
#include <atomic>
#include <exception>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "bindings/bindings.hpp"
#include "core/parallel.hpp"

namespace npattn {

// The thread that Python runs signal handlers in.
static std::atomic<unsigned long> main_thread{0};

// Runs Python's pending signal handlers; non-zero if one of them raised. Called without the GIL, from any
// thread. Only the main thread has signals to handle, and only there the GIL can always be had, even while
// the interpreter ends.
static int check_signals() {
    if (PyThread_get_thread_ident() != main_thread.load(std::memory_order_relaxed)) return 0;
    const PyGILState_STATE state = PyGILState_Ensure();
    const int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised;
}

static void follow_main_thread() {
    const pybind11::object thread = pybind11::module_::import("threading").attr("main_thread")();
    main_thread.store(thread.attr("ident").cast<unsigned long>(), std::memory_order_relaxed);
#if defined(__unix__) || defined(__APPLE__)
    // In a child, Python's main thread is the one that forked.
    pthread_atfork(nullptr, nullptr,
                   [] { main_thread.store(PyThread_get_thread_ident(), std::memory_order_relaxed); });
#endif
}

void bind_threads(pybind11::module_& m) {
    follow_main_thread();
    set_signal_hook(check_signals);
    pybind11::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const Interrupted&) {
            // The signal handler's exception is pending, as check_signals left it.
            if (PyErr_Occurred() == nullptr) PyErr_SetNone(PyExc_KeyboardInterrupt);
        }
    });
    m.def("default_threads", &default_threads);
    m.def("openmp_limit", &openmp_limit);
    m.def("parallel_runtime", &parallel_runtime);
}

} // namespace npattn
