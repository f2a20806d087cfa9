#define KVLOOM_ISA portable

#include "encode_plane.h"
