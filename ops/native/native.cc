// Compiles the library as one unit: TensorFlow's headers take longer to compile than all of it.

// These define functions that the others use.
#include "admission.cc"
#include "mailbox.cc"
#include "gpu/nccl_communicator.cc"
#include "row_generator.cc"
#include "row_file.cc"
#include "row_store.cc"
#include "row_changes.cc"
#include "rows_in_file.cc"
#include "scans.cc"
#include "vectors.cc"
#include "gpu/driver.cc"
// The others follow in any order.
#include "ask.cc"
#include "gpu/ask.cc"
#include "carrier.cc"
#include "gpu/nccl_carrier.cc"  // It follows carrier.cc.
#include "change_set.cc"
#include "snapshot.cc"
#include "data_file.cc"
#include "restore_rows.cc"
#include "checks.cc"
#include "empty_rows.cc"
#include "find_rows.cc"
#include "gpu/find_rows.cc"
#include "gather.cc"
#include "gpu/gather.cc"
#include "answer.cc"  // It follows carrier.cc and gather.cc.
#include "answered_rows.cc"
#include "gpu/pool.cc"
#include "gpu/pool_gradient.cc"
#include "gpu/pooling.cc"
#include "gpu/reduce.cc"
#include "gpu/reduce_update.cc"
#include "hear.cc"
#include "gpu/hear.cc"
#include "lookups.cc"
#include "memory.cc"
#include "merge.cc"
#include "ops.cc"
#include "carrier_ops.cc"  // It follows ops.cc.
#include "pool.cc"
#include "pool_gradient.cc"
#include "reduce.cc"
#include "remote_file_system.cc"
#include "sparse_updates.cc"
#include "update_ops.cc"
#include "gpu/update.cc"
#include "gpu/write.cc"
#include "wire.cc"

extern "C" __attribute__((used, visibility("default"))) const char collective_native_version[] =
    "collective native, TensorFlow "  // ops/native_library.py reads it.
    COLLECTIVE_TENSORFLOW ";";        // setup.py defines it.
