// All of the runtime, compiled once.
#include "air.cpp"
#include "atomic.cpp"
#include "launch.cpp"
#include "matrix.cpp"
#include "memory.cpp"
#include "schedule.cpp"
#include "simdgroup.cpp"
#include "undefined.cpp"
