// What the binding files share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "types.h"

namespace kvloom {

// The kernels of a variant this CPU has; throws std::invalid_argument.
const KernelTable& find_kernels(const std::string& name);

template <class T>
T* address(uintptr_t value) {
    return reinterpret_cast<T*>(value);
}

void bind_step(nanobind::module_& m);

}  // namespace kvloom
