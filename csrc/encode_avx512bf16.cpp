#define KVLOOM_ISA avx512bf16

#include "encode_plane.h"
