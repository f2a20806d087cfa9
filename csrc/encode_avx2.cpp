#define KVLOOM_ISA avx2

#include "encode_plane.h"
