#pragma once

#include <Python.h>

namespace npattn {

// Gives up the GIL for its lifetime. Unlike pybind11::gil_scoped_release it survives the end of the
// interpreter: there, before Python 3.14, taking the GIL back in a daemon thread ends that thread by
// unwinding its stack, which a destructor that must not throw turns into an abort of the process.
class ReleaseGil {
public:
    ReleaseGil() : state_(PyEval_SaveThread()) {}
    ~ReleaseGil() noexcept(false) { PyEval_RestoreThread(state_); }
    ReleaseGil(const ReleaseGil&) = delete;
    ReleaseGil& operator=(const ReleaseGil&) = delete;

private:
    PyThreadState* const state_;
};

} // namespace npattn
