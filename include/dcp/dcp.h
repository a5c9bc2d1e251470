/* dcp/dcp.h - all of libdcp. */
#ifndef DCP_DCP_H
#define DCP_DCP_H

#include "async.h"
#include "backend.h"
#include "base.h"
#include "checkpoint.h"
#include "convert.h"
#include "device.h"
#include "host.h"
#include "load.h"
#include "save.h"
#include "state.h"

#endif
