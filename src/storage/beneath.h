/* Opening a name so that nothing in it, no link either, leads out of a directory. */
#ifndef DCP_STORAGE_BENEATH_H
#define DCP_STORAGE_BENEATH_H

#include <sys/types.h>

/* As openat(dir, name, flags, mode), but fails with EXDEV when the name or a link on its way is absolute or climbs above dir, and
 * with ELOOP or EXDEV for the links of /proc that are no paths. Returns -1 with errno on failure. */
int dcp__open_beneath(int dir, const char *name, int flags, mode_t mode);
/* The same without the kernel's help, for kernels before 5.6 and sandboxes that forbid openat2. */
int dcp__open_beneath_walk(int dir, const char *name, int flags, mode_t mode);

#endif
