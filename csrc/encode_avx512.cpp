#define KVLOOM_ISA avx512

#include "encode_plane.h"
