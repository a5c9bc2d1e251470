/* Parts of tensors from the one rank that can read them to all others: the ranks say which boxes they want, and the box of each
 * tensor that holds all of them goes to everybody in messages of bounded size. */
#ifndef DCP_ENGINE_BROADCAST_H
#define DCP_ENGINE_BROADCAST_H

#include "comm/collective.h"
#include "engine/load/load.h"
#include "engine/load/share.h"

/* Collective. Fills what the requests want. ck of root has the files; that of each other rank need only list the same items.
 * Elements are cast where a target has another dtype that they can be cast to. A failure of any rank ends it on all of them. */
dcp_status dcp__broadcast_tensors(const dcp__step *step, int root, dcp_checkpoint *ck, const dcp_read_request *requests, size_t n,
                                  const dcp_read_opts *opts, dcp__share_bytes *out, dcp_error *err);

#endif
