/* Frames of the session socket, and connections to it. docs/reference/protocol.md describes each frame. */
#pragma once

#include "platform/common.h"

#define FRAME_MAGIC     0x48535047u /* "GPSH" */
#define FRAME_VERSION   1
#define FRAME_FIELDS    12
#define LIBRARY_VERSION 100 /* 0.1.0: major*10000 + minor*100 + patch */

struct frame { /* little-endian, as both architectures are */
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint32_t serial;
    uint32_t flags;
    unsigned char gpu[16];
    uint64_t f[FRAME_FIELDS];
};
_Static_assert(sizeof(struct frame) == 128, "a frame has 128 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian");

enum frame_type {
    FRAME_HELLO = 1,
    FRAME_REQUEST = 2,
    FRAME_RELEASE = 3,
    FRAME_MEMORY = 4,
    FRAME_IDLE = 5,
    FRAME_BUSY = 6,
    FRAME_PAGED_IN = 7,
    FRAME_PAGED_OUT = 8,
    FRAME_QUERY = 10,
    FRAME_RESERVE = 11,
    FRAME_RETURN = 12,
    FRAME_SUSPEND_READY = 14,

    FRAME_WELCOME = 64,
    FRAME_DEVICE = 65,
    FRAME_GRANT = 66,
    FRAME_REVOKE = 67,
    FRAME_PAGE_OUT = 68,
    FRAME_TIER = 69,
    FRAME_PAGE_IN = 70,
    FRAME_STATUS = 71,
    FRAME_RESERVED = 72,
    FRAME_RECALL = 73,
    FRAME_SESSION_MEMORY = 74,
    FRAME_USE = 79,
    FRAME_SUSPEND = 80,
    FRAME_RESUMED = 81,
    FRAME_ERROR = 127,
};

enum { ROLE_CUDA_PROCESS = 1, ROLE_OBSERVER = 2 };
enum error_code { ERROR_MALFORMED = 1, ERROR_VERSION = 2, ERROR_NOT_ALLOWED = 3, ERROR_SESSION_CLOSED = 4 };
enum { RELEASE_IDLE = 0, RELEASE_REVOKED = 1 };
enum { WELCOME_OVERSUBSCRIBED = 1 };
enum { RESERVE_MANAGED = 1, RESERVE_OWN_MANAGED = 2 };
enum { RESERVED_GRANTED = 0 };
enum { SESSION_MEMORY_OTHERS = 0, SESSION_MEMORY_PROCESS = 1 };

/* Fields that the library reads, by frame: their numbers in `f`. */
enum { WELCOME_FLAGS = 4, WELCOME_DEVICES = 5, WELCOME_FEATURES = 6 };
enum { DEVICE_TOTAL = 0 };
enum { GRANT_LEASE = 0, GRANT_PAGE_IN = 2, GRANT_PACE = 3, GRANT_REFUSED = 4 };
enum { REVOKE_LEASE = 0, REVOKE_PAGE_OUT = 1 };
enum { PAGE_OUT_BYTES = 0 };
enum { PAGE_IN_BYTES = 0 };
enum { STATUS_MEMORY = 5, STATUS_TOTAL = 7 };
enum { RESERVED_ADDED = 0, RESERVED_RESULT = 1, RESERVED_NUMBER = 2, RESERVED_OTHERS = 3 };
enum { RECALL_BYTES = 0, RECALL_NUMBER = 1 };
enum { SESSION_MEMORY_KIND = 0 };            /* the other fields by kind */
enum { OTHERS_BYTES = 1 };                   /* SESSION_MEMORY_OTHERS */
enum { PROCESS_PID = 1, PROCESS_BYTES = 2 }; /* SESSION_MEMORY_PROCESS */
enum { USE_PID = 0, USE_TIME = 1, USE_PERIOD = 2 };
enum { SUSPEND_NUMBER = 0 };
enum { RESUMED_NUMBER = 0 };
enum { ERROR_CODE = 0 };

/* Capabilities of the library (in HELLO) or the agent (in WELCOME). */
enum feature {
    FEATURE_PACE = 1,
    FEATURE_RESERVE = 2,
    FEATURE_USE = 32,
    FEATURE_SUSPEND = 64,  /* only of the library with engine `suspend` */
    FEATURE_OBSERVE = 128, /* only of the library with engine `observe` */
    FEATURE_CELLS = 256,   /* only of the agent, for notebook servers */
    FEATURE_PAGE_IN = 512, /* only of the library */
};
#define LIBRARY_FEATURES  (FEATURE_PACE | FEATURE_RESERVE | FEATURE_PAGE_IN)
#define OBSERVER_FEATURES (FEATURE_RESERVE | FEATURE_USE)

/* A connection: frames of one version, each in its own packet. No call waits or takes a lock; only one thread at a time
   uses a connection. */
struct frame_socket {
    int file; /* -1 while there is no connection */
    uint32_t serial;
};
#define FRAME_SOCKET_CLOSED {-1, 0}

/* The connection to the agent, which only the background thread uses. */
HIDDEN struct frame_socket frame_socket_agent;

/* Connect. False: the agent does not listen, or too many connections are pending. */
bool frame_socket_connect(struct frame_socket *connection, const char *path);

/* Send a frame. False: the agent does not read its frames, and the connection is closed. */
bool frame_socket_send(struct frame_socket *connection, struct frame *frame);

/* Read a frame. 1: a frame was read; 0: none is available; -1: the connection has ended, or the message is not a frame
   of this version. */
int frame_socket_receive(struct frame_socket *connection, struct frame *frame);

void frame_socket_close(struct frame_socket *connection);
